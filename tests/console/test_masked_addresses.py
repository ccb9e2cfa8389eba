"""A user without the right to see addresses sees none: whatever an error says, and wherever its text was handed on.

Errors are normalized to kinds and cut to fit, and then they hold no whole address any more that could be recognized.
"""

from __future__ import annotations

import datetime as dt
import re
from contextlib import suppress

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from outbox import Message, Orphan, Park, Resolution, Settings
from outbox.dispatch.dispatch_pass import dispatch_lock
from outbox.reconcile.job import Access, Job, Pair, Window
from outbox.reconcile.run import reconcile
from outbox.testing import bulk, check, drain
from tests.console.test_masked import GROUP, TOPIC, WHY, Till, paths
from tests.console.web import Asker, Shop, console_of
from tests.flow.support import World
from tests.operator.health import sql

#: Each is a failure of its own; none of the clues may be seen of it.
ERRORS = (
    'connection to server at "db.canary.internal" (10.83.7.219), port 54329 failed: refused',
    "no pool for postgresql://ann:pw-canary@db.canary.internal:54329/canary_shop now",
    "no pool for postgresql+psycopg://ann:pw-canary@[fd00:83::7:219]:54329/canary_shop now",
    "no way to db.canary.internal:54329/canary_shop now",
    "no route to 10.83.7.219 now",
    "no route to fd00:83::7:219 now",
    'could not translate host name "db.canary.internal" to address',
    *(f"{'long ' * 197} {' ' * spaces}no way to db.canary.internal:54329/canary_shop now" for spaces in (0, 2)),
    *(f'{"long " * 196}{" " * spaces}server at "db.canary.internal", port 54329' for spaces in (0, 4)),
    *(f"{'long ' * 197}{' ' * spaces}by postgresql://ann:pw-canary@db.canary.internal/x" for spaces in (0, 3)),
)
# No id, time or size has one of these by chance.
CLUES = r"canary|(?::|port )54329|10\.83\.7|fd00:|:7:219|\bann:|//ann"
#: Where the framework keeps what went wrong, or what was done about it.
SINCE = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
KEPT = ("owner", "error", "last_error", "reason", "outcome", "result", "note", "pause_reason", "opened_because")


COLUMNS = """
SELECT table_name, column_name, data_type FROM information_schema.columns
 WHERE table_schema = 'outbox' AND column_name = ANY (:names) AND table_name NOT LIKE 'consumer_message%'
   AND table_name NOT LIKE 'attempt_history%'
"""


def leaks(answer: str) -> list[str]:
    """Return what an answer has of an address, with what stands around it."""
    return [answer[max(found.start() - 60, 0) : found.end() + 20] for found in re.finditer(CLUES, answer)][:3]


def fail(message: Message, _: Session) -> Park:
    """Park a message or fail at it, and say why."""
    error = ERRORS[message.body["number"]]
    if message.tag == "raise":
        raise ConnectionError(error)
    return Park(error)


def ask_again(_: Orphan) -> Resolution:
    """Fail as a checker."""
    raise ConnectionError(ERRORS[0])


@pytest.fixture
def till(shop: Shop, ask: Asker) -> Till:
    """A shop in which all went wrong that can, with an address in each text that is kept of it."""
    outbox, engine = shop.outbox, shop.engine
    till, world = Till(outbox, engine), World(engine, (engine,) * 3, Settings(immunity=0.0))
    outbox.consumer(TOPIC, group=GROUP, retry_delays=(3600.0,))(fail)
    outbox.checker(TOPIC)(ask_again)
    with Session(engine) as session, session.begin():
        for number in range(len(ERRORS)):
            for tag in ("park", "raise"):
                till.messages.append(outbox.send(session, TOPIC, {"number": number}, tag=tag))
        till.messages.append(outbox.prepare(session, TOPIC, {}))
    world.refusing.add("hotel")
    till.messages.append(world.start())
    world.go()
    drain(outbox)
    check(outbox)
    admin = ask(console_of(outbox), "admin")
    fingerprint = admin.get("/dead/groups").json()[0]["fingerprint"]
    assert admin.post(f"/dead/groups/{fingerprint}/note", {"note": "x"}).status_code == 200
    outbox.operator.silence("message.parked", 3600, by="bob", why="x", topic=TOPIC)
    outbox.operator.pause_group(GROUP, by="bob", why="x")
    outbox.operator.pause_topic(TOPIC, by="bob", why="x")
    selector = {"ids": [str(each) for each in till.messages[::2]], "group": GROUP}
    till.jobs.append(admin.post("/bulk-jobs", {"action": "retry", "selector": selector, **WHY}).json()["id"])
    bulk(outbox)
    drain(outbox)
    access = Access(engine.url.render_as_string(hide_password=False), outbox.settings)
    found = reconcile(Job(access, access, (Pair(TOPIC, GROUP),), window=Window(since=SINCE, grace=0.0)))
    till.runs = [pair.run_id for pair in found.pairs]
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE outbox.group_control SET opened_at = now(), trial_at = now(), opened_because = 'x'")
        )
        columns = connection.execute(text(COLUMNS), {"names": list(KEPT)}).all()
        for table, name, kind in columns:
            value = "jsonb_build_object('why', CAST(:error AS text))" if kind == "jsonb" else ":error"
            with suppress(IntegrityError), connection.begin_nested():  # where there may be none
                connection.execute(text(f"UPDATE outbox.{table} SET {name} = {value}"), {"error": ERRORS[3]})
    return till


def test_nothing_shows_an_address(till: Till, ask: Asker) -> None:
    """No page, endpoint or export shows it to a viewer, however it was cut; an admin sees it on all of these."""
    http = ask(console_of(till.outbox), "admin")
    seen = [path for path in paths(till, http) if leaks(http.ask("GET", path).text)]
    assert len({path.split("?")[0].split("/")[1] for path in seen}) > 5
    viewer, shown = http.as_role("viewer"), {}
    for path in paths(till, viewer):
        answer = viewer.ask("GET", path)
        assert answer.status_code != 500, path
        if found := leaks(answer.text):
            shown[path] = found
    assert not shown, "\n".join(f"{path}: {found}" for path, found in shown.items())


def test_a_source_that_is_not_registered(shop: Shop, ask: Asker) -> None:
    """Its address is shown to users that see addresses alone: not in a list, nor in what refuses one."""
    with shop.engine.begin() as connection:
        connection.execute(
            text("INSERT INTO outbox.message_source VALUES ('away', 1, gen_random_uuid(), :address, now())"),
            {"address": "db.canary.internal:54329/canary_shop"},
        )
        connection.execute(
            text(
                "INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts)"
                " VALUES (:group, 'away@1', 0, 1, 0)"
            ),
            {"group": GROUP},
        )
    http = ask(console_of(shop.outbox), "admin")
    looks = [
        f"{at}messages?group={GROUP}&status=unconsumed{and_}"
        for at in ("/", "/api/v1/")
        for and_ in ("", "&topic=away")
    ]
    assert all(leaks(http.ask("GET", path).text) for path in looks)
    viewer = http.as_role("viewer")
    assert [leaks(viewer.ask("GET", path).text) for path in looks] == [[]] * len(looks)


def test_the_session_that_holds_a_lock(shop: Shop, ask: Asker) -> None:
    """Its user, its client and what it calls itself are where a database is reached from."""
    with shop.engine.connect() as connection, connection.begin():
        connection.execute(text("SET application_name TO 'canary'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": dispatch_lock("outbox")})
        http = ask(console_of(shop.outbox), "admin")
        (held,) = http.get("/locks").json()["items"]
        (masked,) = http.as_role("viewer").get("/locks").json()["items"]
    assert held["application_name"] == "canary"
    assert (masked["user"], masked["client"], masked["application_name"]) == ("***", "***", "***")


def test_the_processes_that_send(shop: Shop, ask: Asker) -> None:
    """Their names are what messages are masked of: at which host and process they were sent."""
    columns = "(id, name, producer_group, version, started_at, seen_at)"
    process = "(gen_random_uuid(), 'canary:4711', 'shop', '1', now(), now())"
    sql(shop.engine, f"INSERT INTO outbox.producer_process {columns} VALUES {process}")
    http = ask(console_of(shop.outbox), "admin")
    looks = ("/api/v1/producers", "/handlers")
    assert all(leaks(http.ask("GET", path).text) for path in looks)
    viewer = http.as_role("viewer")
    assert [leaks(viewer.ask("GET", path).text) for path in looks] == [[], []]
    assert [row["name"] for row in viewer.get("/producers").json()["items"]] == ["***"]
