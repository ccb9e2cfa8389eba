"""A service with its database and its provider's, processes of it that can be killed, and what can be seen of them."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from outbox.consumer.consumer import Consumer
from outbox.database.decision import fence_key
from tests.check.killed import NAME, PAID, SETTINGS
from tests.check.support import Bench
from tests.kit import Tables, wait_until

TABLES = """
CREATE TABLE change (number int, part int, PRIMARY KEY (number, part));
CREATE TABLE note (number int);
CREATE TABLE effect (number int);
"""
PROVIDER_TABLE = "CREATE TABLE payment (number int PRIMARY KEY, part int)"
_EMPTY = "; ".join(
    f"DELETE FROM {table}"
    for table in (
        *("change", "note", "effect"),
        *(f"outbox.{name}" for name in ("half_message", "half_check", "check_history", "op_message", "message")),
        *(f"outbox.{name}" for name in ("dispatch_cursor", "topic", "consumer_message", "consumer_offset")),
    )
)
_HALF = """
SELECT h.id, h.topic, o.resolution, o.decided_by, c.check_times, c.parked_at IS NOT NULL AS parked
  FROM outbox.half_message h
  LEFT JOIN outbox.op_message o ON o.half_id = h.id
  LEFT JOIN outbox.half_check c ON c.half_id = h.id
 WHERE (convert_from(h.body, 'UTF8')::jsonb ->> 'number')::int = :number
"""
_HELD = """
SELECT count(*) FROM pg_locks
 WHERE locktype = 'advisory' AND granted AND ((classid::int8 << 32) | objid::int8) = :key
"""
#: An op that is written and not committed.
_WRITING_OP = """
SELECT count(*) FROM pg_locks WHERE relation = 'outbox.op_message'::regclass AND mode = 'RowExclusiveLock'
"""
_POSTPONE = text("UPDATE outbox.half_check SET next_check_at = now() + interval '1 hour' WHERE half_id = :id")
_EFFECT = text("INSERT INTO effect VALUES (:number)")


class Child:
    """A process that stops where it is told to."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, what: Any) -> tuple[str, str]:
        """Let it go on; return what it says next: ("stopped", where) or ("ended", how)."""
        self._pipe.send(what)
        assert self._pipe.poll(60), "the process neither stops nor ends"
        said: tuple[str, str] = self._pipe.recv()
        return said

    def go_on(self) -> str:
        """Let it go on to the end; return how it ended."""
        said, how = self.tell("go on")
        assert said == "ended"
        return how

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.join()


@dataclass(frozen=True)
class Look:
    """How far a function has come, as others see it; ``fence``: somebody holds its fence."""

    prepared: bool
    decided: bool
    fence: bool
    changed: bool


class Town:
    """The two databases; workers on the service's, processes of the service, and who looks on."""

    def __init__(self, url: str, provider_url: str, stack: ExitStack) -> None:
        self.url, self.provider_url = _named(url), _named(provider_url)
        self.engine = create_engine(url)
        stack.callback(self.engine.dispose)
        self.provider = create_engine(provider_url, isolation_level="AUTOCOMMIT")
        self.observer = create_engine(url, isolation_level="AUTOCOMMIT")
        self._stack = stack
        for engine, sql in ((self.observer, _EMPTY), (self.provider, "DELETE FROM payment")):
            stack.callback(engine.dispose)
            with engine.connect() as connection:
                connection.exec_driver_sql(sql)

    def worker(self, checker: Callable[..., Any] | None = None) -> Bench:
        """Return a worker, with or without a checker."""
        outbox = Outbox(self.engine, settings=SETTINGS)
        if checker is not None:
            outbox.checker("paid")(checker)
        return Bench(outbox, self.observer, self._stack)

    def child(self, target: Callable[..., None], *args: Any) -> Child:
        """Start a process."""
        child = Child(target, *args)
        self._stack.callback(child.kill)
        return child

    # --- acts --------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """End all connections of the processes."""
        for engine in (self.observer, self.provider):
            Tables(engine).cut(f"application_name = '{NAME}'")

    def wait_for_the_end(self) -> None:
        """Wait until the server has noticed that a process is gone."""
        count = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{NAME}'"
        wait_until(lambda: self.value(count) == 0, "its connections end")

    def postpone(self, number: int) -> None:
        """Have the half with a number not be due, if it is undecided."""
        with self.observer.connect() as connection:
            connection.execute(_POSTPONE, {"id": self.half(number).id})

    def deliver(self) -> None:
        """Dispatch, and consume everything, twice."""
        self.worker().dispatch()
        app = Outbox(self.engine, settings=SETTINGS)
        for topic in ("sent", "fenced", "paid"):
            app.consumer(topic, group="g")(_handle)
        for subscription in (*app.subscriptions.values(), *app.subscriptions.values()):
            consumer = Consumer(subscription, SETTINGS)
            with self.engine.connect() as connection:
                consumer.start(connection, connection)
                while consumer.consume_once(connection, connection):
                    pass

    # --- looks -------------------------------------------------------------------------------------------

    def rows(self, sql: str, **values: Any) -> list[Any]:
        """Return the rows of a query."""
        with self.observer.connect() as connection:
            return list(connection.execute(text(sql), values))

    def value(self, sql: str, **values: Any) -> Any:
        """Return the first column of the first row."""
        return self.rows(sql, **values)[0][0]

    def half(self, number: int) -> Any:
        """Return what is known of the half with a number; None if there is none."""
        rows = self.rows(_HALF, number=number)
        return rows[0] if rows else None

    def changed(self, number: int) -> bool:
        """Tell whether the function with a number has had its effect, which it has wholly or not at all."""
        parts = self.value("SELECT count(*) FROM change WHERE number = :number", number=number)
        assert parts in {0, 2}
        return bool(parts) or self.paid(number)

    def paid(self, number: int) -> bool:
        """Ask the provider."""
        with self.provider.connect() as connection:
            return bool(connection.scalar(PAID, {"number": number}))

    def look(self, number: int) -> Look:
        """Return how far the function with a number has come."""
        half = self.half(number)
        held = half is not None and self.value(_HELD, key=fence_key("outbox", half.id)) > 0
        return Look(half is not None, half is not None and half.resolution is not None, held, self.changed(number))

    def writing_op(self) -> bool:
        """Tell whether an op is written and not committed."""
        return bool(self.value(_WRITING_OP))

    def answers(self, number: int) -> list[str | None]:
        """Return what came of each check of the half with a number."""
        sql = "SELECT answer FROM outbox.check_history WHERE half_id = :id ORDER BY id"
        return [row[0] for row in self.rows(sql, id=self.half(number).id)]

    def count(self, table: str) -> Counter[int]:
        """Return how often each number is in a table."""
        return Counter(row[0] for row in self.rows(f"SELECT number FROM {table}"))

    def see_that_nothing_is_left(self) -> None:
        """See that there is no lock, no open transaction, and no half that somebody could still decide."""
        assert self.rows("SELECT * FROM outbox.half_check WHERE parked_at IS NULL") == []
        assert self.rows("SELECT * FROM pg_locks WHERE locktype = 'advisory'") == []
        open_ones = "SELECT pid FROM pg_stat_activity WHERE xact_start IS NOT NULL AND datname = current_database()"
        assert self.rows(f"{open_ones} AND pid <> pg_backend_pid() AND backend_type = 'client backend'") == []


def _named(url: str) -> str:
    named = make_url(url).update_query_dict({"application_name": NAME})
    return named.render_as_string(hide_password=False)


def _handle(message: Message, session: Session) -> None:
    session.execute(_EFFECT, {"number": message.body["number"]})
