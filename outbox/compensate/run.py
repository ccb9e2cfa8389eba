"""Run a compensation: in one transaction with its record, which makes it happen once ever, and the end of its item.

One item of a compensation, and the entries about it in the producer's database: a transaction for each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox.calling.engine import RecordedCall
from outbox.compensate import sql
from outbox.compensate.quarantine import QuarantineOrder
from outbox.database.execute import Row, Statement, execute
from outbox.database.identity import source_identity
from outbox.database.sql import audit, begin_bulk_job, plan_by_index, wait_at_most
from outbox.errors import InvalidMessage
from outbox.message import content
from outbox.message.masking import cleaned
from outbox.message.model import Message, read_headers
from outbox.settings import Settings
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long (seconds) no other worker takes an item that one has leased, beside the time that its compensation has.
LEASE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompensationItem(QuarantineOrder):
    """A leased item of a compensation, as the order that the consumers' databases get to know.

    ``outcome`` is the one written before, ``refused`` that it was decided not to compensate it, ``started`` that it
    isn't the first item of its bulk job.
    """

    key: sql.Key
    attempts: int
    outcome: str | None
    refused: bool
    acknowledged: bool
    cancelled_by: str | None
    started: bool

    @classmethod
    def of(cls, key: sql.Key, row: Row) -> CompensationItem:
        """Return a row of `sql.lease`; where the message was placed is yet to be read."""
        message_id, topic, actor, reason, origin, former, attempts, outcome, refused, options, cancelled_by, started = (
            row
        )
        return cls(
            message_id,
            topic,
            key.bulk_job_id,
            actor,
            reason,
            json.loads(origin) if origin else None,
            (),
            tuple(former),
            key=key,
            attempts=attempts,
            outcome=outcome,
            refused=refused,
            acknowledged=bool(json.loads(options).get("acknowledge_delivered")),
            cancelled_by=cancelled_by,
            started=started,
        )

    @property
    def untouched(self) -> bool:
        """Is it certain that nothing was ever quarantined for it, or for an earlier bulk job?"""
        return self.attempts == 1 and self.outcome is None and not self.former


class ItemTable:
    """Reads and writes about items, on a connection that isn't in a transaction."""

    def __init__(self, connection: Connection, schema: str, lease: float = LEASE) -> None:
        self.schema = schema
        self._connection = connection
        self._lease = lease

    def lease(self, key: sql.Key) -> CompensationItem | None:
        """Take an item that is due, for the time of the lease; None if it isn't, or another worker has it."""
        (rows,) = self._run(sql.lease(self.schema, **key._asdict(), lease=self._lease))
        if not rows:
            return None
        item = CompensationItem.of(key, rows[0])
        if not item.started:
            # Not with the lease: an operator's cancel locks the bulk job first, and then its items.
            self._run(begin_bulk_job(self.schema, key.bulk_job_id))
        return item

    def read(self, item: CompensationItem) -> tuple[Row, CompensationItem]:
        """Return the row of `sql.states` of the item's message, and the item with where the message is placed now."""
        states, sent = sql.states(self.schema, ids=[item.message_id]), sql.sends(self.schema, item.message_id)
        (row,), sends, ((source, _),) = self._run(states, sent, source_identity(self.schema))
        return row, replace(item, sends=tuple(sends), source=source)

    def ended(self, item: CompensationItem) -> tuple[str, bool]:
        """Return the item's state, and whether its message was compensated."""
        (rows,) = self._run(sql.ended(self.schema, **item.key._asdict()))
        return rows[0] if rows else ("cancelled", False)

    def leave(self, item: CompensationItem, outcome: str, seconds: float) -> str:
        """Leave a leased item for later; return its state."""
        key = item.key._asdict()
        self._run(sql.wait(self.schema, **key, attempts=item.attempts, outcome=outcome, seconds=seconds))
        return "pending"

    def refuse(self, item: CompensationItem, why: str) -> bool:
        """Decide that its message will not be compensated; False if it was, or the item isn't pending any more."""
        (rows,) = self._run(sql.refuse(self.schema, **item.key._asdict(), outcome=sql.REFUSED + why))
        return bool(rows)

    def close(self, item: CompensationItem, state: str, outcome: str) -> str:
        """End a pending item; return its state."""
        self._run(sql.close(self.schema, **item.key._asdict(), state=state, outcome=outcome))
        return state

    def _run(self, *statements: Statement) -> list[list[Row]]:
        with self._connection.begin():
            return execute(self._connection, plan_by_index(), *statements)[1:]


#: How long (seconds) a statement may wait for a lock, those of the compensation too.
PATIENCE = 10.0
_SHOWN = 1000


class StaleItem(Exception):
    """The rows looked at before have changed; nothing was done."""


@dataclass(slots=True, eq=False)
class CompensationRun(RecordedCall[Message]):
    """One run of a compensation.

    ``consumed`` names the groups that the message took effect in, ``quarantined`` those that are quarantined.
    """

    settings: Settings
    item: CompensationItem
    consumed: list[str]
    quarantined: list[str]

    def begin(self, connection: Connection) -> Message:
        """Make the record; return the message.

        Raises:
            StaleItem: the item isn't to be done any more.
        """
        schema, item, half_id = self.settings.schema, self.item, self.item.message_id
        _, stands, ops, sends, made, messages = execute(
            connection,
            wait_at_most(PATIENCE),
            sql.stands(schema, **item.key._asdict()),
            sql.lock_op(schema, half_id),
            # A statement of its own, after the lock: a resend that this one waited for is seen.
            sql.sends(schema, half_id),
            sql.compensate(schema, half_id, self.function.name, item.actor, item.reason),
            sql.message(schema, half_id),
        )
        if not stands:
            raise StaleItem("it is not to be compensated any more")
        if not ops or not messages:
            raise StaleItem("it was pruned")
        if not made:
            raise StaleItem("it was compensated")
        if item.sends and len(sends) != len(item.sends):
            raise StaleItem("it was sent again")
        key, tag, headers, kind, body, born_at, visible_at = messages[0]
        queue, position = sends[0] if sends else (0, 0)
        headers, encoding = read_headers(headers)
        at, as_read = (item.topic, queue, position), (self.function.model, self.function.codecs, encoding)
        return Message(half_id, *at, key, tag, kind, body, born_at, visible_at, 1, item.attempts, headers, *as_read)

    def end(self, connection: Connection, argument: Message, answer: Any) -> None:
        """Write what it returned, the end of the item, and the audit."""
        schema, item, result = self.settings.schema, self.item, _as_json(answer)
        although = f", although {', '.join(self.consumed)} consumed it" if self.consumed else ""
        outcome = f"compensated by {self.function.name}{although}"
        audited = {
            "bulk_job": item.key.bulk_job_id,
            "function": self.function.name,
            "quarantined": self.quarantined,
            "consumed": self.consumed,
            "returned": None if result is None else cleaned(json.loads(result), argument.secrets, is_text=True),
        }
        done, _, _ = execute(
            connection,
            sql.close(schema, **item.key._asdict(), state="done", outcome=outcome),
            sql.result(schema, result, item.message_id),
            audit(schema, item.actor, "compensate", str(item.message_id), item.reason, audited, item.origin),
        )
        if not done:
            raise StaleItem("it is not to be compensated any more")


def _as_json(result: Any) -> str | None:
    """Return a result as JSON that the database takes; as a text where it has none."""
    if result is None:
        return None
    try:
        raw, content_type = content.encode(result)
        if content.is_json(content_type) and "\\u0000" not in (text := raw.decode()):
            return text
    except (InvalidMessage, UnicodeDecodeError):  # it isn't JSON: then a text is shown
        pass
    return json.dumps(storable(result if isinstance(result, str) else repr(result))[:_SHOWN])
