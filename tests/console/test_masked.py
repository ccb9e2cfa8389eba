"""A masked value is masked wherever it shows: a secret is sent through everything that can hand it on, and looked for.

Every page, endpoint and export, and every command that shows something, is called by people who may not see bodies.
Neither the secret may be in an answer nor what is derived from it: its digests, and the size of its body.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime as dt
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
import typer
from fastapi.routing import iter_route_contexts
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import Message, Orphan, Outbox, Park, Resolution, Retry, Settings, Skip
from outbox.cli import app as commands
from outbox.console import Bearer, Principal, hash_token
from outbox.console.context import REVEAL, VIEW
from outbox.embedded import ServerLike
from outbox.operator.look.redactor import Redactor
from outbox.operator.model import MessageFilter, PageRequest
from outbox.reconcile.job import Access, Job, Pair, Window
from outbox.reconcile.run import reconcile
from outbox.testing import bulk, check, drain
from outbox.text import process_name
from tests.cli.conftest import run_cli
from tests.console.web import Asker, Http, console_of, token_of
from tests.kit.databases import clones

SECRET, MENDED = "5105-1051-0510-canary", "5105-mended-canary"
TOPIC, GROUP = "payments", "charging"
#: What no other size or number is likely to be.
PADDING = "~" * 12_000
BODY = {"customer": 7, "padding": PADDING, "payment": {"cardNumber": SECRET, "api.key": SECRET}}
WHY = {"reason": "by the phone"}


@dataclass
class Till:
    """A database in which a secret came everywhere, and the ids of what there is to look at."""

    outbox: Outbox
    engine: Engine
    messages: list[UUID] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    runs: list[UUID] = field(default_factory=list)

    def send(self, topic: str = TOPIC, **options: Any) -> UUID:
        """Send a payment."""
        with Session(self.engine) as session, session.begin():
            headers = {"Authorization": SECRET, "trace": "1"}
            self.messages.append(self.outbox.send(session, topic, BODY, headers=headers, **options))
        return self.messages[-1]


def charge(message: Message, session: Session) -> Any:
    """Quote the secret in all that a handler can say."""
    secret = message.body["payment"]["cardNumber"]
    match message.tag:
        case "raise":
            raise ValueError(f"declined: {message.body!r}")
        case "raise short":
            raise LookupError(f"no card {secret}")
        case "park":
            return Park(f"declined {secret}")
        case "skip":
            return Skip(f"has {secret}")
        case "retry":
            return Retry(reason=f"busy with {json.dumps(message.body['payment'])}")
        case "database":
            session.execute(text("SELECT CAST(:secret AS int)"), {"secret": secret})
        case "refuse":
            message.refuse(session, f"card {secret} was stolen")
    return None


def call(message: Message) -> None:
    """Quote the secret outside of a transaction."""
    raise ValueError(f"no answer to {message.body['payment']}")


def ask_again(orphan: Orphan) -> Resolution:
    """Fail as a checker that quotes the body."""
    raise ConnectionError(f"nobody knows {orphan.body}")


def undo(message: Message, _: Session) -> dict[str, Any]:
    """Return the secret by its name and by another one."""
    if message.tag == "raise":
        raise ValueError(f"can't refund {message.body['payment']['cardNumber']}")
    return {"cardNumber": SECRET, "refunded": [SECRET], "note": f"to {SECRET}"}


@pytest.fixture(scope="module")
def till(server: ServerLike, template: str, ask: Asker) -> Iterator[Till]:
    """The database, after everything has happened to its payments."""
    with clones(server, template, "console_till") as (engine,):
        settings = dataclasses.replace(Settings(), immunity=0.0, compensation_attempts=1)
        till = Till(Outbox(engine, group="till", settings=settings), engine)
        outbox = till.outbox
        outbox.consumer(TOPIC, group=GROUP, retry_delays=(3600.0,))(charge)
        outbox.consumer("outside", group="calling", retry_delays=(3600.0,), transactional=False)(call)
        outbox.checker(TOPIC, max_checks=1)(ask_again)
        outbox.compensation(TOPIC, consumers=[])(undo)
        outbox.compensation("undone", consumers=[])(undo)

        @outbox.on_parked(TOPIC)
        def tell(letter: Any, _: Session) -> str:
            return f"{letter.reason} {SECRET}"

        @outbox.two_phase(topic=TOPIC, fenced=False)
        def pay(**body: Any) -> None:
            raise ValueError(f"can't pay {body}")

        tags = ("raise", "raise short", "park", "skip", "retry", "database", "fine")
        by_tag = {tag: till.send(tag=tag) for tag in tags}
        till.send("outside")
        till.send(tag="refuse", reply_to="answers")
        till.send(delay=86_400)
        with pytest.raises(ValueError):
            pay(**BODY)
        with Session(engine) as session, session.begin():
            till.messages.append(outbox.prepare(session, TOPIC, BODY))
        drain(outbox)
        check(outbox)
        drain(outbox)
        undone = [till.send("undone", tag=tag) for tag in ("fine", "raise")]
        drain(outbox)
        admin = ask(console_of(outbox), "admin")
        for message_id in undone:
            till.jobs.append(admin.post(f"/messages/{message_id}/compensate", WHY).json()["id"])
        selector = {"ids": [str(by_tag["raise"])], "group": GROUP}
        till.jobs.append(admin.post("/bulk-jobs", {"action": "retry", "selector": selector, **WHY}).json()["id"])
        bulk(outbox)
        drain(outbox)
        mended = BODY | {"payment": {"cardNumber": MENDED, "api.key": MENDED}, "customer": 8}
        edited = admin.post(f"/messages/{by_tag['park']}/edit", {"body": json.dumps(mended), **WHY})
        assert edited.status_code in {200, 201}, edited.text
        till.messages.append(UUID(edited.json()["id"]))
        drain(outbox)
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE outbox.consumer_message SET body_digest = substr(sha256('other'), 1, 16) "
                     "WHERE message_id = :id"), {"id": by_tag["fine"]}
            )  # fmt: skip
            till.messages += connection.execute(text("SELECT id FROM outbox.half_message")).scalars()
        access = Access(engine.url.render_as_string(hide_password=False), settings)
        since = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)
        found = reconcile(Job(access, access, (Pair(TOPIC, GROUP),), window=Window(since=since, grace=0.0)))
        assert "digest_mismatch" in {kind.label for kind in found.pairs[0].differences}
        till.runs = [pair.run_id for pair in found.pairs]
        till.messages = sorted(set(till.messages))
        yield till


def clues(till: Till) -> list[str]:
    """What no answer may have in it: the secrets, their digests and those of bodies, and the sizes of bodies."""
    with till.engine.connect() as connection:
        bodies = connection.execute(text("SELECT body FROM outbox.half_message WHERE topic <> 'answers'")).scalars()
        raws = {bytes(each) for each in bodies}
    found = [SECRET, MENDED, base64.b64encode(SECRET.encode()).decode()[:20]]
    for raw in (*raws, SECRET.encode(), MENDED.encode()):
        for digest in (hashlib.new(name, raw).digest() for name in ("sha256", "md5", "sha1")):
            found += [digest.hex()[:8], base64.b64encode(digest).decode()[:10]]
        found.append(f"{binascii.crc32(raw):08x}")
        if len(raw) > len(PADDING):
            found += [str(len(raw)), f"{len(raw):,}", f"{len(raw) / 1000:.1f} kB"]
    return found


def leaks(answer: str, found: list[str]) -> list[str]:
    """Return which clues an answer has: not as a part of another number or id."""
    there = [each for each in found if each in answer]
    return [each for each in there if "canary" in each or re.search(rf"(?<![\w-]){re.escape(each)}(?!-)", answer)]


def paths(till: Till, http: Http) -> Iterator[str]:
    """Every GET of the console, with each id that there is."""
    fingerprints = [row["fingerprint"] for row in http.get("/dead/groups").json()]
    values: dict[str, list[Any]] = {
        "message_id": till.messages, "run_id": till.runs, "bulk_job_id": till.jobs, "fingerprint": fingerprints,
        "group": [GROUP], "topic": [TOPIC], "flow_id": till.messages[:1], "name": ["x.css"], "rest": ["x"],
        "action": ["retry"], "session": ["6564f1a2.1267"], "command": till.messages[:1], "act": ["pause"],
    }  # fmt: skip
    for context in iter_route_contexts(http.app.routes):
        if "GET" not in (context.methods or ()):
            continue
        template = str(context.path).replace(":path}", "}")
        filled = [template]
        for name in re.findall(r"{(\w+)}", template):
            # All messages have a page of their own; what leads on from it, some of them.
            some = values[name] if template.endswith("{message_id}") else values[name][:3]
            filled = [each.replace(f"{{{name}}}", str(value)) for each in filled for value in some]
        yield from filled
    yield from (f"/inbox?status={status}" for status in ("failed", "parked", "consumed"))
    yield from ("/audit?summed=false", "/halves?status=parked", "/messages?body=customer%3D7")


@pytest.mark.parametrize(("role", "display"), [("viewer", "masked"), ("admin", "hidden")])
def test_no_answer_has_a_secret(till: Till, ask: Asker, role: str, display: Any) -> None:
    """No page, endpoint or export shows the secret or what is derived from it; an admin has to have it revealed."""
    http, found, sizes = ask(console_of(till.outbox, redactor=Redactor(display)), role), clues(till), 0
    for path in paths(till, http):
        if role == "admin" and path.endswith("/payload/raw"):
            continue  # which reveals it, on record
        answer = http.ask("GET", path)
        assert answer.status_code != 500, path
        assert leaks(answer.text, found) == [], (path, leaks(answer.text, found))
        sizes += answer.status_code == 200
    assert sizes > 100


def test_no_command_shows_a_secret(till: Till, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command that shows something has it, in any form; to reveal a body must be said, and is recorded."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", till.engine.url.render_as_string(hide_password=False))
    found, calls = clues(till), 0
    of_one: dict[str, list[Any]] = {
        "messages": till.messages,
        "half": till.messages,
        "bulk": till.jobs,
        "reconcile": till.runs,
    }

    def read(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
        if hasattr(command, "commands"):
            for name, each in command.commands.items():
                yield from read(each, *path, name)
        elif {"show", "list", "export", "groups", "scheduled", "runs", "conversation"} & set(path[1:]):
            body = ["--body"] if any("--body" in each.opts for each in command.params) else []
            if not any(each.name in {"id_", "run"} for each in command.params):
                yield (*path, *body)
            elif path[0] in of_one and path[1] in {"show", "conversation"}:
                some = of_one[path[0]] if path == ("messages", "show") else of_one[path[0]][:2]
                yield from ((*path, str(each), *body) for each in some)

    for path in read(typer.main.get_command(commands)):
        if path[0] in {"topics", "sagas"}:
            continue
        forms = [["-o", "ndjson"], ["-o", "csv"]] if "export" in path else [["-o", "json"], []]
        for form in forms:
            result = run_cli(*path, *form)
            assert result.code in {0, 1}, (path, result.err)
            assert leaks(result.out + result.err, found) == [], path
            calls += 1
    assert calls > 50
    shown = run_cli("messages", "show", str(till.messages[0]), "--body", "--reveal", "--actor", "ann", "-o", "json")
    assert shown.json["body"]["payment"]["cardNumber"] == SECRET
    audited = run_cli("audit", "list", "--target", str(till.messages[0]), "-o", "json").json["items"]
    assert ("ann", "reveal") in {(row["actor"], row["action"]) for row in audited}


def test_reports_have_no_clue(till: Till, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a comparison leaves behind says that bodies differ, and nothing from which a body could be found."""
    url = till.engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv("OUTBOX_DATABASE_URL", url)
    until = dt.datetime.now(dt.UTC).isoformat()
    html, prometheus, folder = tmp_path / "report.html", tmp_path / "outbox.prom", tmp_path / "findings"
    files = ["--html", str(html), "--prometheus", str(prometheus), "--findings", str(folder)]
    pair = ["reconcile", "--topic", TOPIC, "--group", GROUP, "--grace", "0s", "--until", until]
    result = run_cli(*pair, *files, "-o", "json")
    texts = [result.out, result.err, run_cli(*pair).out, html.read_text(), prometheus.read_text()]
    (parquet,) = folder.rglob("*.parquet")
    with till.engine.connect() as connection:
        kept = connection.execute(text("SELECT detail::text FROM outbox.reconciliation_finding")).scalars().all()
    assert "digest_mismatch" in result.out
    assert leaks("\n".join((*texts, *kept)), clues(till)) == []
    assert b"digest\x00" not in parquet.read_bytes().replace(b"_digest", b"digest\x00")


def test_custom_names_are_masked_in_what_is_shown_of_a_message(
    till: Till, ask: Asker, make_console: Callable[..., Http]
) -> None:
    """Names that only this console masks: errors and results of a message don't quote their values either."""
    with Session(till.engine) as session, session.begin():
        body = {"salary": "123456-canary", "tag": "x", "payment": {"cardNumber": "none"}}
        message_id = till.outbox.send(session, "salaries", body)

    def pay(message: Message, _: Session) -> None:
        raise ValueError(f"too much: {message.body['salary']}")

    till.outbox.consumer("salaries", group="paying", retry_delays=(3600.0,))(pay)
    drain(till.outbox)
    http = make_console(till.outbox, redactor=Redactor(keys="salary"))
    for path in (f"{'/api/v1'}/messages/{message_id}", f"/messages/{message_id}"):
        answer = http.ask("GET", path).text
        assert "too much: ***" in answer
        assert "123456-canary" not in answer
        # Where bodies aren't read, the whole error is masked.
        conversation = http.ask("GET", f"{path}/conversation")
        assert conversation.status_code == 200
        assert "too much" not in conversation.text
    found = till.outbox.operator.messages(MessageFilter(topic="salaries"), PageRequest())
    assert [row.id for row in found.items] == [message_id]


def test_where_a_message_was_sent_is_an_address(till: Till, ask: Asker) -> None:
    """Host and process of a sender are for those who may see addresses; others can't search by them or reveal them."""
    message_id, sender = till.send("elsewhere"), process_name()
    path, search = f"/messages/{message_id}", {"header": f"outbox-sender={sender}"}
    revealing = Principal("rita", "Rita", frozenset({VIEW, REVEAL}))
    consoles = {role: console_of(till.outbox, redactor=Redactor("full")) for role in ("viewer", "operator", "admin")}
    consoles["revealing"] = console_of(till.outbox, authorizer=Bearer({hash_token(token_of("revealing")): revealing}))
    for role, console in consoles.items():
        http, sees = ask(console, role), role in {"operator", "admin"}
        assert http.get(path).json()["half"]["headers"]["outbox-sender"] == (sender if sees else "***"), role
        assert (sender in http.ask("GET", path).text) == sees, role
        assert http.get("/messages", params=search).status_code == (200 if sees else 422), role
    revealed = ask(consoles["revealing"], "revealing").ask("POST", f"{path}/reveal")
    assert (revealed.status_code, SECRET in revealed.text, sender in revealed.text) == (200, True, False)


def test_errors_are_searched_as_they_are_shown(till: Till, ask: Asker) -> None:
    """By a host that is masked for a viewer it finds nothing; by the rest of the error it does."""
    till.send("unreached")

    def call(message: Message) -> None:
        raise ConnectionError('connection to server at "db7.corp.example", port 5432 failed: refused')

    till.outbox.consumer("unreached", group="reaching", retry_delays=(3600.0,), transactional=False)(call)
    drain(till.outbox)
    for role, words, found in (
        ("viewer", "db7", 0), ("viewer", "5432", 0), ("viewer", "failed: refused", 1), ("admin", "db7", 1),
    ):  # fmt: skip
        http = ask(console_of(till.outbox), role)
        rows = http.get("/inbox", params={"group": "reaching", "error": words, "status": "failed"}).json()["items"]
        assert len(rows) == found, (role, words)
