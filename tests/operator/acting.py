"""What the tests of operators' acts share: messages in every state, and what is known of them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, create_engine, text

from outbox import Outbox, Settings
from outbox.acts.changes import Actor, Target
from outbox.embedded import ServerLike
from outbox.message.model import Counts, uuid7
from outbox.operator.bulk import run
from outbox.operator.databases import Databases, open_database
from outbox.operator.look.paging import every
from outbox.operator.model import (
    BulkItem,
    BulkItemFilter,
    BulkItemState,
    BulkJob,
    InboxFilter,
    MessageFilter,
    Preview,
    Selector,
)
from outbox.operator.operator import Operator
from tests.kit import dispatch_all

ANN = Actor("ann", {"via": "console", "ip": "192.0.2.7"})
KIND = "NoAccount in bank_b.py:credit"

_INBOX = text(
    "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,"
    " next_attempt_at, last_error, error_kind, discarded_at)"
    " SELECT :group, id, :topic, 0, place, :status, 3, CASE WHEN :status = 'failed' THEN now() + interval '1 hour' END,"
    " CASE WHEN :status IN ('failed', 'parked') THEN 'NoAccount: no account 7' END,"
    " CASE WHEN :status IN ('failed', 'parked') THEN :kind END, CASE WHEN :discarded THEN now() END"
    " FROM unnest(CAST(:ids AS uuid[])) WITH ORDINALITY m (id, place)"
)


@dataclass
class Desk:
    """An operator's desk over one or more databases, and the applications that fill them."""

    engines: dict[str, Engine]
    databases: Databases
    outbox: Outbox

    @property
    def operator(self) -> Operator:
        """The operator over these databases."""
        return Operator(self.databases)

    @classmethod
    def over(cls, **engines: Engine) -> Desk:
        """Return a desk over these databases; the first is the producer's."""
        settings = Settings()
        opened = [open_database(name, engine, settings) for name, engine in engines.items()]
        return cls(engines, Databases(opened), Outbox(next(iter(engines.values())), settings=settings))

    @property
    def engine(self) -> Engine:
        """The first database."""
        return next(iter(self.engines.values()))

    # --- messages ----------------------------------------------------------------------------------------

    def half(self, state: str, topic: str = "transfers") -> UUID:
        """Return a message that is in this state on the producer's side."""
        if state == "unknown":
            return uuid7()
        with self.engine.begin() as connection:
            if state in {"undecided", "fenced", "rolled_back"}:
                half_id = self.outbox.prepare(connection, topic, {})
            else:
                delay = 3600 if state in {"scheduled", "recalled", "deferred"} else None
                half_id = self.outbox.send(connection, topic, {}, delay=delay)
        match state:
            case "fenced":
                self.run("UPDATE outbox.half_check SET fenced = true WHERE half_id = :id", id=half_id)
            case "rolled_back":
                self.outbox.rollback(half_id)
            case "dispatched" | "compensated" | "compensating" | "scheduled" | "recalled":
                self.dispatch()
        match state:
            case "recalled":
                self.operator.recall(half_id, by="bob", why="before")
            case "compensated":
                self.run(
                    "INSERT INTO outbox.compensation (half_id, function, requested_by, reason)"
                    " VALUES (:id, 'undo', 'bob', 'before')",
                    id=half_id,
                )
            case "compensating":
                self.start("compensate", half_id)
        return half_id

    def dispatch(self) -> None:
        """Turn committed ops into messages."""
        dispatch_all(self.engine, self.outbox.settings)

    def inbox(
        self,
        state: str,
        count: int = 1,
        *,
        group: str = "bank-b",
        topic: str = "transfers",
        kind: str = KIND,
        ids: Sequence[UUID] = (),
        database: str | None = None,
    ) -> list[UUID]:
        """Put rows in this state into an inbox; return the messages."""
        ids = list(ids) or [uuid7() for _ in range(count)]
        if state != "unconsumed":
            status = "parked" if state == "discarded" else state
            values = {"group": group, "topic": topic, "status": status, "kind": kind, "ids": ids}
            with (self.engines[database] if database else self.engine).begin() as connection:
                connection.execute(_INBOX, values | {"discarded": state == "discarded"})
        return ids

    # --- what is done ------------------------------------------------------------------------------------

    def act(self, action: str, message_id: UUID, group: str | None = None, **options: Any) -> str:
        """Do one thing to one message."""
        given = {"by": ANN, "why": "because", "version": None, "database": None}
        given |= {name: options.pop(name) for name in list(options) if name in given}
        return self.operator.act(action, Target(message_id, group), options=options, **given)  # type: ignore[arg-type]

    def preview(self, action: str, selected: Any, *, database: str | None = None, **options: Any) -> Preview:
        """Preview a bulk job."""
        return self.operator.preview(action, selector(selected), database=database, options=options)

    def start(self, action: str, selected: Any, **options: Any) -> BulkJob:
        """Order a bulk job; by a filter with the token of a preview just before, unless one is given."""
        given: dict[str, Any] = {"by": ANN, "why": "because", "database": None, "rate": None}
        given |= {"idempotency_key": None, "token": None}
        given |= {name: options.pop(name) for name in list(options) if name in given}
        if given["token"] is None and selector(selected).targets is None:
            given["token"] = self.preview(action, selected, database=given["database"], **options).token
        return self.operator.start(action, selector(selected), options=options, **given)

    def work(self, *, rated: bool = False, database: str | None = None) -> Counts:
        """Carry all open bulk jobs out, as a worker would."""
        total = Counts()
        with (self.engines[database] if database else self.engine).connect() as connection:
            while counts := run.bulk_once(connection, self.outbox.settings, rated=rated):
                total += counts
            run.bulk_once(connection, self.outbox.settings)
        return replace(total, more=False)  # a slow machine takes several passes

    # --- what is known -----------------------------------------------------------------------------------

    def bulk_job(self, row: BulkJob) -> BulkJob:
        """Return how a bulk job stands now."""
        return self.operator.bulk_job(row.id)

    def items(self, row: BulkJob, state: str | None = None) -> list[BulkItem]:
        """Return the items of a bulk job."""
        chosen = BulkItemFilter(None if state is None else BulkItemState(state))
        return list(every(partial(self.operator.bulk_items, row.id, chosen)))

    def run(self, sql: str, **values: Any) -> None:
        """Run a statement in the first database."""
        with self.engine.begin() as connection:
            connection.execute(text(sql), values)

    def rows(self, sql: str, *, database: str | None = None, **values: Any) -> list[Any]:
        """Return the rows of a query, or the values where it has one column."""
        with (self.engines[database] if database else self.engine).connect() as connection:
            rows = connection.execute(text(sql), values).all()
        return [row[0] if len(row) == 1 else tuple(row) for row in rows]

    def inbox_row(self, message_id: UUID) -> tuple[Any, ...]:
        """Return status, attempts, whether it is due now, and whether it is discarded."""
        (row,) = self.rows(
            "SELECT status, attempts, coalesce(next_attempt_at <= clock_timestamp(), false), discarded_at IS NOT NULL"
            " FROM outbox.consumer_message WHERE message_id = :id",
            id=message_id,
        )
        return tuple(row)

    def audited(self, target: object) -> list[tuple[Any, ...]]:
        """Return actor, action, reason, result and origin of each audit row of a target."""
        sql = "SELECT actor, action, reason, result, origin FROM outbox.audit WHERE target = :target ORDER BY id"
        return list(self.rows(sql, target=str(target)))

    def audits(self) -> int:
        """Count all audit rows."""
        return int(self.rows("SELECT count(*) FROM outbox.audit")[0])


def selector(selected: Any) -> Selector:
    """Return what selects these: a filter, a message, pairs of message and group, or a selector itself."""
    match selected:
        case Selector():
            return selected
        case MessageFilter():
            return Selector(messages=selected)
        case InboxFilter():
            return Selector(inbox=selected)
        case UUID():
            return Selector(targets=(Target(selected),))
    return Selector(targets=tuple(Target(*each) if isinstance(each, tuple) else Target(each) for each in selected))


@contextmanager
def open_desk(server: ServerLike, template: str, *names: str) -> Iterator[Desk]:
    """Give a desk over new databases of these names."""
    made = {name: f"desk_{uuid7().hex}_{name}" for name in names}
    for database in made.values():
        server.create_database(database, template=template)
    engines = {name: create_engine(server.url(database)) for name, database in made.items()}
    try:
        yield Desk.over(**engines)
    finally:
        for engine in engines.values():
            engine.dispose()
        for database in made.values():
            server.drop_database(database)


NewDesk = Callable[..., Desk]
