"""The pages of the console over 10,000 topics and millions of messages: time in the database, in all, and their size.

Each page is requested of the application itself, without a network. Then twenty users request pages at once.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, LiteralString
from urllib.parse import urlencode

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from benchmarks.console import BAR, explain, report, rows_of, timed
from benchmarks.console_fill import CONVERSATIONS, fill
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure
from benchmarks.reconcile_fill import Books
from outbox import Settings
from outbox.console import Bearer, Principal, Role, create_console_app, hash_token
from outbox.operator.model import BulkJobFilter, MessageFilter, PageRequest
from outbox.operator.operator import Operator

#: The most that a page may weigh (KB).
MOST_KB = 300.0
_TOPICS, _USERS, _REQUESTS = 10_000, 20, 200
_TOKEN = "a token of the benchmark, of no other"  # noqa: S105 - it opens nothing but the benchmark's own console

# A topic has a queue, a message a group that has consumed it, or in one of a hundred hasn't.
_WIDE_PRODUCER: Sequence[LiteralString] = (
    "INSERT INTO outbox.topic (name, queues) SELECT 'wide.' || n, 1 FROM generate_series(1, %(topics)s::int) n",
    """WITH given AS MATERIALIZED (
           SELECT n, overlay(made.id(n)::text placing '00000001' from 29)::uuid AS id
             FROM generate_series(1, %(topics)s::int8) n
       ), half AS (
           INSERT INTO outbox.half_message (id, producer_group, topic, key, content_type, body, born_at)
           SELECT id, 'bank_a', 'wide.' || n, 'account-' || n, 'application/json', made.body(n), made.at(n) FROM given
       ), op AS (
           INSERT INTO outbox.op_message (half_id, sequence, resolution, decided_by, decided_at)
           SELECT id, (SELECT max(sequence) FROM outbox.op_message) + n, 'commit', 'producer', made.at(n) FROM given
       )
       INSERT INTO outbox.message (topic, queue, position, half_id, send_number, visible_at)
       SELECT 'wide.' || n, 0, 1, id, 1, made.at(n) FROM given""",
)
_WIDE_CONSUMER: Sequence[LiteralString] = (
    """INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts)
       SELECT 'mail', 'wide.' || n, 0, CASE WHEN n %% 100 = 0 THEN 0 ELSE 1 END, 0
         FROM generate_series(1, %(topics)s::int) n""",
)
# As the worker writes them once a minute; those of the last hour are what the first page reads.
_SAMPLES: LiteralString = """
UPDATE outbox.stats_sample
   SET stats = stats || jsonb_build_object(
       'topics', stats -> 'topics' || (SELECT jsonb_object_agg('wide.' || n, jsonb_build_object('messages', 1))
                                         FROM generate_series(1, %(topics)s::int) n),
       'groups', stats -> 'groups' || (SELECT jsonb_object_agg('wide.' || n, jsonb_build_object(
                                              'mail', jsonb_build_object('consumed', 1, 'lag', 0)))
                                         FROM generate_series(1, %(topics)s::int) n),
       'work', jsonb_build_object('transfer', jsonb_build_object('bank_b', jsonb_build_object(
                                  'done', 4000, 'failed', 3, 'calls', '{"20": 3900, "31": 100}'::jsonb))))
 WHERE sampled_at > now() - interval '75 minutes'
"""


def run(lab: Lab) -> Iterator[Figure]:
    """Fill both databases, request each page, then many at once."""
    rows, topics = lab.scale(rows_of(), 20_000), lab.scale(_TOPICS, 200)
    write(lab, rows, topics)
    yield Figure(f"over {rows / 1e6:g} million messages and {topics:,} topics: in the database, in all, size", "")
    yield from pages(lab)


def write(lab: Lab, rows: int, topics: int) -> None:
    """Write the messages of one topic, and so many topics with one."""
    books = Books(lab.psycopg, "producer", "consumer", lambda what: lab.say(f"console_pages: {what}"))
    fill(books, rows, int(time.time() * 1000))
    for name, statements in ((books.producer, _WIDE_PRODUCER), (books.consumer, _WIDE_CONSUMER)):
        with books.connect(name) as connection:
            for statement in (*statements, _SAMPLES):
                connection.execute(statement, {"topics": topics})
                connection.commit()
    books.vacuum()


def pages(lab: Lab) -> Iterator[Figure]:
    """Request the pages."""
    engines = {"bank_a": lab.engine("producer"), "bank_b": lab.engine("consumer")}
    for engine in engines.values():
        report(engine)
    paths = list(_paths(Operator.open(engines, Settings())))
    authorizer = Bearer({hash_token(_TOKEN): Principal.of("ada", Role.ADMIN)})
    app = create_console_app(engines["bank_a"], databases={"bank_b": engines["bank_b"]}, authorizer=authorizer)
    with start_blocking_portal() as portal:
        ask = _asker(portal, app)
        for name, path in paths:
            lab.say(f"console_pages: {name}")
            yield _page(name, partial(ask, path), lab.scale(5, 2))
        yield _at_once(ask, [path for _, path in paths], lab.scale(_REQUESTS, 40))


def _paths(admin: Operator) -> Iterator[tuple[str, str]]:
    """Return the pages by name, with filters that find much and little."""
    for name in ("dead", "halves", "scheduled", "cron", "handlers", "silences", "locks", "system"):
        yield name, f"/{name}"
    for path in ("messages", "inbox", "audit", "bulk-jobs", "reconciliations", "sagas"):
        yield path, f"/{path}"
    for path, criteria in (
        ("messages", {"topic": "transfer", "status": "dispatched"}),
        ("messages", {"key": "account-77"}),
        ("messages", {"topic": "wide.77"}),
        ("messages", {"group": "bank_b", "status": "unconsumed"}),
        ("inbox", {"status": "parked", "error": "does not exist"}),
        ("inbox", {"group": "bank_b", "status": "failed"}),
        ("audit", {"actor": "operator-7"}),
    ):
        yield f"{path} by {', '.join(criteria)}", f"/{path}?{urlencode(criteria)}"
    yield "a group", "/groups/bank_b/transfer?database=bank_b"
    (message,) = admin.messages(MessageFilter(topic="wide.77"), PageRequest(size=1)).items
    yield "a message", f"/messages/{message.id}"
    yield "a conversation", f"/messages/{list(CONVERSATIONS)[1]}/conversation"
    (job,) = admin.bulk_jobs(BulkJobFilter(), PageRequest(size=1)).items
    yield "a bulk job", f"/bulk-jobs/{job.id}"
    # They read the samples of a window.
    yield "groups", "/groups"
    for window in ("1h", "6h", "24h", "7d"):
        yield f"overview over {window}", f"/?window={window}"


def _asker(portal: BlockingPortal, app: Any) -> Any:
    transport = httpx.ASGITransport(app)
    headers = {"Authorization": f"Bearer {_TOKEN}"}

    async def get(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            return await client.get(path)

    return lambda path: portal.call(get, path)


def _page(name: str, ask: Any, times: int) -> Figure:
    in_database, in_all, answer = [], [], None
    for number in range(times + 1):
        with timed() as statements:
            began = time.perf_counter()
            answer = ask()
        if number:  # the first fills caches, and prepares
            in_all.append((time.perf_counter() - began) * 1000)
            in_database.append(sum(took for _, _, took in statements))
    assert answer is not None
    assert answer.status_code == 200, (name, answer.status_code, answer.text[:500])
    database, size = statistics.median(in_database), len(answer.content) / 1000
    if database > BAR:
        slowest, values, _ = max(statements, key=lambda each: each[2])
        explain(name, slowest, values, ask)
    return Figure(
        name,
        f"{database:.0f} ms, {statistics.median(in_all):.0f} ms, {size:.0f} KB",
        f"{len(statements)} statements",
        bar=f"≤ {BAR:.0f} ms, ≤ {MOST_KB:.0f} KB",
        met=database <= BAR and size <= MOST_KB,
    )


def _at_once(ask: Any, paths: Sequence[str], requests: int) -> Figure:
    """Have users request all pages, one after the other, each from another one on."""
    lock, took, refused = threading.Lock(), [], 0

    def use(user: int) -> None:
        nonlocal refused
        for path in islice([*paths, *paths][user % len(paths) :], requests // _USERS):
            began = time.perf_counter()
            status = ask(path).status_code
            with lock:
                took.append((time.perf_counter() - began) * 1000)
                refused += status != 200

    began = time.perf_counter()
    with ThreadPoolExecutor(_USERS) as users:
        list(users.map(use, range(_USERS)))
    seconds = time.perf_counter() - began
    took.sort()
    return Figure(
        f"{_USERS} users at once",
        f"{len(took) / seconds:.1f} pages/s, p50 {took[len(took) // 2]:.0f}, p95 {took[len(took) * 95 // 100]:.0f} ms",
        f"{refused} of {len(took)} were refused",
        bar="none refused",
        met=not refused,
    )


BENCHMARK = Benchmark(run, ("producer", "consumer"))
