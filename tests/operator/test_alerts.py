"""Alerts: each change of the health is told once over all workers, to a real webhook and to functions."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox, Park, Settings
from outbox.errors import InvalidHandler
from outbox.message.model import Counts
from outbox.operator.health.alerts import Alert, alert_once, payload
from outbox.worker import Worker
from tests.kit import wait_until
from tests.operator.health import consume, dispatch, report, sample, send, sql, this_minute


class Hook(ThreadingHTTPServer):
    """A webhook, as a chat has one; it answers with ``status``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/services/T0/SECRET"

    @property
    def alerts(self) -> list[tuple[str, str]]:
        """State and rule of all that it took."""
        each = [alert for body in self.bodies for alert in body["metadata"]["event_payload"]["alerts"]]
        return [(alert["state"], alert["code"]) for alert in each]


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.status == 200:
            self.server.bodies.append(body)
        self.send_response(self.server.status)
        self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the framework's parameter
        """Say nothing."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    """A webhook that listens."""
    with Hook() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def tick(engine: Engine, outbox: Outbox) -> Counts:
    """Make one pass of the alerts, a minute after the last one."""
    age(engine)
    return look(engine, outbox)


def age(engine: Engine) -> None:
    """Let a minute pass: all samples become older, and there is a new one."""
    for minutes in (100_000, -99_999):  # not at once, since a row would meet the next one
        sql(engine, "UPDATE outbox.stats_sample SET sampled_at = sampled_at - make_interval(mins => :n)", n=minutes)
    sample(engine, this_minute(engine), {})


def look(engine: Engine, outbox: Outbox) -> Counts:
    """Make one pass of the alerts."""
    with engine.connect() as connection:
        return alert_once(connection, Settings(), outbox.alert_targets)


def park(engine: Engine) -> None:
    """Have a group park a message."""
    report(engine)
    send(engine, 1)
    dispatch(engine)
    consume(engine, engine, [Park("no")])


def test_begun_and_over(engine: Engine, hook: Hook) -> None:
    """A change is told once, with what mends it and the page of the console; nothing else is."""
    outbox = Outbox(engine, settings=Settings())
    outbox.alerts(hook.url, console="https://ops.example/outbox/")
    report(engine)
    assert tick(engine, outbox) == Counts()
    park(engine)
    assert tick(engine, outbox) == Counts(taken=1, done=1)
    assert look(engine, outbox) == Counts(), "nobody claims a sample twice"
    assert tick(engine, outbox) == Counts(), "it is known"
    (body,) = hook.bodies
    assert body["text"].startswith("outbox: 1 begun. 1 message of topic 'paid' is parked in group 'mail'")
    (block,) = body["blocks"]
    assert block["type"] == "section"
    assert block["text"]["type"] == "mrkdwn"
    assert block["text"]["text"].startswith(":red_circle: 1 message of topic 'paid'")
    assert "outbox dead retry mail/" in block["text"]["text"]
    assert block["text"]["text"].endswith("\n<https://ops.example/outbox/dead?group=mail&topic=paid|console>")
    sql(engine, "DELETE FROM outbox.consumer_message")
    assert tick(engine, outbox) == Counts(taken=1, done=1)
    assert hook.alerts == [("begun", "message.parked"), ("over", "message.parked")]


def test_more_of_the_same_is_no_change(engine: Engine, hook: Hook) -> None:
    """A finding whose numbers change goes on; that of another group is another one."""
    outbox = Outbox(engine, settings=Settings())
    outbox.alerts(hook.url)
    park(engine)
    tick(engine, outbox)
    sql(engine, "UPDATE outbox.consumer_message SET changed_at = changed_at - interval '1 hour'")
    assert tick(engine, outbox) == Counts()
    for table in ("consumer_message", "consumer_offset"):
        sql(engine, f"UPDATE outbox.{table} SET consumer_group = 'post'")
    assert tick(engine, outbox).done == 2
    assert sorted(hook.alerts[1:]) == [("begun", "message.parked"), ("over", "message.parked")]


@pytest.mark.parametrize("trouble", ["500", "302", "gone"])
def test_told_again_when_it_failed(engine: Engine, hook: Hook, caplog: pytest.LogCaptureFixture, trouble: str) -> None:
    """A target that doesn't take it is told a minute later, the others once; no log or repr has the URL."""
    heard: list[Alert] = []
    outbox = Outbox(engine, settings=Settings())
    outbox.alerts(hook.url.replace(str(hook.server_port), "1") if trouble == "gone" else hook.url)
    outbox.alerts(heard.extend, name="pager")
    hook.status = int(trouble) if trouble.isdigit() else 200
    park(engine)
    with caplog.at_level(logging.DEBUG):
        assert tick(engine, outbox) == Counts(taken=2, done=1, failed=1)
    assert [alert.code for alert in heard] == ["message.parked"]
    failed = [record for record in caplog.records if getattr(record, "outbox_event", "") == "alert.failed"]
    (line,) = [record.getMessage() for record in failed]
    assert line == "alerts 'alerts': the webhook didn't take the changes (1)"
    said = "\n".join(logging.Formatter().format(record) for record in failed) + repr(outbox.alert_targets)
    assert "SECRET" not in said
    assert ("can't be reached" if trouble == "gone" else f"it answered {trouble}") in said
    if trouble != "gone":
        hook.status = 200
        assert tick(engine, outbox) == Counts(taken=1, done=1)
        assert hook.alerts == [("begun", "message.parked")]
    assert len(heard) == 1


def test_one_of_many_workers_tells(engine: Engine, hook: Hook) -> None:
    """Of eight workers at one moment, one claims the sample."""
    outbox = Outbox(engine, settings=Settings())
    outbox.alerts(hook.url)
    park(engine)
    age(engine)
    together = threading.Barrier(8)

    def worker(_: int) -> Counts:
        with engine.connect() as connection:
            together.wait()
            return alert_once(connection, Settings(), outbox.alert_targets)

    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(worker, range(8)))
    assert sum(each.done for each in counts) == 1
    assert hook.alerts == [("begun", "message.parked")]


def test_a_worker_that_died_over_it(engine: Engine, hook: Hook) -> None:
    """What it had claimed keeps the others off for two minutes; then one of them goes on from the sample before."""
    outbox = Outbox(engine, settings=Settings())
    outbox.alerts(hook.url)
    park(engine)
    tick(engine, outbox)
    claimed = """UPDATE outbox.stats_sample SET stats = jsonb_set(stats, '{alerts}', jsonb_build_object('claimed',
                 clock_timestamp() - make_interval(secs => :ago)))
                  WHERE sampled_at = (SELECT max(sampled_at) FROM outbox.stats_sample)"""
    age(engine)
    sql(engine, claimed, ago=10)
    sql(engine, "DELETE FROM outbox.consumer_message")
    assert tick(engine, outbox) == Counts()
    sql(
        engine,
        """UPDATE outbox.stats_sample SET stats = jsonb_set(stats, '{alerts,claimed}',
           to_jsonb(clock_timestamp() - interval '3 minutes')) WHERE NOT stats -> 'alerts' ? 'known'""",
    )
    assert tick(engine, outbox).done == 1
    assert hook.alerts == [("begun", "message.parked"), ("over", "message.parked")]


def test_what_is_told_is_chosen(engine: Engine) -> None:
    """Problems by default, notes if asked for, or some rules alone."""
    problems: list[Alert] = []
    notes: list[Alert] = []
    chosen: list[Alert] = []
    outbox = Outbox(engine, settings=Settings())
    outbox.alerts(problems.extend)
    outbox.alerts(notes.extend, name="notes", notes=True)
    outbox.alerts(chosen.extend, name="chosen", codes="worker.lost")
    report(engine, number=2)
    sql(engine, "UPDATE outbox.worker SET seen_at = seen_at - interval '5 minutes'")
    park(engine)
    tick(engine, outbox)
    assert [each.code for each in problems] == ["message.parked"]
    assert sorted(each.code for each in notes) == ["message.parked", "worker.lost"]
    assert [(each.code, each.severity, each.url) for each in chosen] == [("worker.lost", "note", None)]


def test_a_message_that_a_chat_takes() -> None:
    """Many changes are cut to what it shows; what it would read as markup is escaped."""
    alerts = [Alert("begun", str(n), "x", "note", f"<{n}> & more", "mend", "bank", None) for n in range(30)]
    made = payload(alerts)
    assert len(made["blocks"]) == 21
    assert made["blocks"][0]["text"]["text"] == ":large_yellow_circle: &lt;0&gt; &amp; more\nmend"
    assert made["blocks"][-1]["text"]["text"] == "and 10 more"
    assert len(made["metadata"]["event_payload"]["alerts"]) == 30


def test_a_worker_tells(engine: Engine) -> None:
    """The duty of a worker does it, with the samples that the worker takes."""
    heard: list[Alert] = []
    outbox = Outbox(engine, settings=Settings())
    outbox.alerts(heard.extend, codes=["message.parked"])
    park(engine)
    with Worker(outbox, roles=["dispatch"]) as worker:

        def told() -> Sequence[Alert]:
            worker.wake()
            return heard

        wait_until(told, "the function is called")
    assert [alert.code for alert in heard] == ["message.parked"]


def test_declarations_that_are_refused(engine: Engine) -> None:
    """The error names the alerts, and has no URL in it."""
    outbox = Outbox(engine, settings=Settings())
    outbox.alerts(print)
    with pytest.raises(InvalidHandler, match="there are alerts 'alerts' already"):
        outbox.alerts(print)

    async def tell(alerts: Sequence[Alert]) -> None: ...

    for target in ("ftp://chat.example/SECRET", "https://", tell, 5):
        with pytest.raises(InvalidHandler, match="alerts 'b'") as refused:
            outbox.alerts(target, name="b")  # type: ignore[arg-type]  # what is tried
        assert "SECRET" not in str(refused.value)
    with pytest.raises(InvalidHandler, match="console"):
        outbox.alerts(print, name="b", console="ops.example")
