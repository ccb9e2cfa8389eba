"""Settle leased messages: each act is one guarded statement in the caller's transaction.

A client that has taken a message says what came of it: it is done (`acknowledge`), it needs more time (`extend`), or
it failed (`fail`). What it says counts as long as its lease does: the number of the lease is the row's, and its end
lies ahead by the database's clock. Else it is told that it came too late, and changes nothing: by then the message may
be in other hands. An acknowledgement that is given again is told that it counted the first time.

In the transaction of the application's own change (`acknowledge` with its connection) the effect is exactly once: where
the lease has ended, the caller rolls its change back.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import enum
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from outbox.calling.callback import parked_callback
from outbox.consumer import key_order, subscription
from outbox.consumer.failure import tell_parked
from outbox.consumer.leased import sql
from outbox.consumer.sql import InboxUpdate, message_by_id, write_attempt
from outbox.consumer.subscription import EVERYTHING, Entry, Subscription, to_entry
from outbox.database.at_commit import after_commit
from outbox.database.execute import Row, Statement, execute
from outbox.database.sql import GroupQueue, wait_at_most
from outbox.message.answer import HandlerFailure
from outbox.message.model import Message, Status
from outbox.settings import Settings
from outbox.telemetry.events import MessagesHandled
from outbox.telemetry.hooks import emit
from outbox.text import process_name

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: The longest time (seconds) for which a message can be taken at once.
LONGEST_LEASE = 12 * 3600.0


class Settlement(enum.Enum):
    """What came of a client's word on a leased message."""

    DONE = enum.auto()
    BEFORE = enum.auto()  # the same lease has said so before
    HELD = enum.auto()  # another transaction has the row: it is being settled, and nothing is changed
    LATE = enum.auto()  # the lease has ended, or never was: nothing is changed


class RowHeld(Exception):
    """Another transaction has the row of a message, and the caller doesn't wait for it: nothing is changed."""


#: So long (seconds) an act that doesn't wait for rows of leases waits for any other lock.
_BRIEFLY = 0.2

#: How the words of a lease's handle begin: its form, which `lease_of` in SQL knows too.
_FORM = "1"


def sealed(*parts: object) -> str:
    """Return a handle: the parts, and a checksum, so that one that was cut or typed is none."""
    text = " ".join(map(str, parts))
    return base64.urlsafe_b64encode(f"{binascii.crc32(text.encode()):08x} {text}".encode()).decode().rstrip("=")


def unsealed(handle: str, parts: int) -> list[str]:
    """Return so many parts of a handle; raise ValueError if it is none of so many."""
    text = base64.b64decode(handle + "=" * (-len(handle) % 4), altchars=b"-_", validate=True).decode()
    checksum, _, rest = text.partition(" ")
    words = rest.split(" ")
    if checksum != f"{binascii.crc32(rest.encode()):08x}" or len(words) != parts:
        raise ValueError(handle)
    return words


class MessageLease(NamedTuple):
    """The right of a client to one message: of a group, under the name by which it keeps the topic, by its number."""

    group: str
    topic: str
    queue: int
    position: int
    message_id: UUID
    number: int

    @property
    def handle(self) -> str:
        """The lease as a text, by which any process settles the message, in SQL too."""
        return sealed(_FORM, self.group, self.topic, self.queue, self.position, self.message_id, self.number)

    @classmethod
    def of_handle(cls, handle: str) -> MessageLease:
        """Return the lease that a handle is; raise ValueError if it is none."""
        form, group, feed, queue, position, id_, number = unsealed(handle, 7)
        if form != _FORM:
            raise ValueError(handle)
        return cls(group, feed, _stored(queue), _stored(position), UUID(id_), _stored(number))


def _stored(text: str) -> int:
    """Return a number as a column can have it; raise ValueError for all else: the checksum is no secret."""
    if not 0 <= (number := int(text)) < 1 << 63:
        raise ValueError(text)
    return number


@dataclass(slots=True)
class Taken:
    """A message that a client has taken: at attempt number ``attempt``, from 1, ``until`` then by the database."""

    message: Message
    lease: MessageLease
    attempt: int
    until: dt.datetime


def _rows(connection: Connection, statement: Statement, *, waits: bool) -> list[Row]:
    """Return the rows of a statement about leases; without ``waits``, let it wait for no lock for long."""
    return execute(connection, *(() if waits else (wait_at_most(_BRIEFLY),)), statement)[-1]


def acknowledge(
    connection: Connection, schema: str, leases: Sequence[MessageLease], *, waits: bool = True
) -> list[Settlement]:
    """Write that messages were handled under their leases, in the caller's transaction; return what came of each.

    Without ``waits``, those whose rows other transactions have are told to be held.
    """
    pairs: defaultdict[tuple[str, str], list[MessageLease]] = defaultdict(list)
    for lease in leases:
        pairs[lease.group, lease.topic].append(lease)
    outcomes: dict[MessageLease, Settlement] = {}
    # In one order everywhere, as all locks of several rows.
    for (group, topic), several in sorted(pairs.items()):
        statement = sql.acknowledge(schema, waits=waits, group=group, topic=topic, **_columns(several))
        rows = _rows(connection, statement, waits=waits)
        # Of a message there may be several: an older lease of a client's, and the one that took its place.
        done = {(row[0], row[3]) for row in rows}
        outcomes |= dict.fromkeys((each for each in several if (each.message_id, each.number) in done), Settlement.DONE)
        if rows:
            _go_on(connection, schema, group, topic, rows)
        if missing := [each for each in several if each not in outcomes]:
            statuses = _statuses(connection, schema, missing)
            for each in missing:
                outcomes[each] = _ACKNOWLEDGED.get(statuses.get(each), Settlement.LATE)
    return [outcomes[lease] for lease in leases]


#: What an acknowledgement is told that changed nothing, by where its message stands.
_ACKNOWLEDGED: dict[Status | None, Settlement] = {Status.CONSUMED: Settlement.BEFORE, Status.TAKEN: Settlement.HELD}


def _statuses(connection: Connection, schema: str, leases: Sequence[MessageLease]) -> dict[MessageLease, Status]:
    """Return where messages of one group and topic stand that have the numbers of these leases, by a new snapshot."""
    (rows,) = execute(connection, sql.statuses(schema, **_of(leases), **_columns(leases)))
    found = {(id_, number): Status(status) for id_, number, status in rows}
    return {each: status for each in leases if (status := found.get((each.message_id, each.number)))}


def _of(leases: Sequence[MessageLease]) -> dict[str, str]:
    return {"group": leases[0].group, "topic": leases[0].topic}


def _columns(leases: Iterable[MessageLease]) -> dict[str, Any]:
    ordered = sorted(leases, key=lambda lease: lease.message_id)
    return {"ids": [each.message_id for each in ordered], "numbers": [each.number for each in ordered]}


def _go_on(connection: Connection, schema: str, group: str, topic: str, rows: Sequence[Row]) -> None:
    """Release what waited for messages that are done, and tell of them after the COMMIT."""
    keys = dict.fromkeys(key for *_, key in rows if key is not None)
    if keys:
        execute(connection, *(key_order.release_key(schema, group, topic, key) for key in keys))
    handled: defaultdict[tuple[int, int], list[UUID]] = defaultdict(list)
    for id_, attempt, queue, *_ in rows:
        handled[queue, attempt].append(id_)
    for (queue, attempt), ids in handled.items():
        event = MessagesHandled(group=group, topic=topic, queue=queue, message_ids=tuple(ids), attempt=attempt)
        after_commit(connection, partial(emit, event))


def successor(lease: MessageLease) -> MessageLease:
    """Return the lease that is to take the place of one that is extended."""
    return lease._replace(number=secrets.randbits(53))


def extend(
    connection: Connection,
    schema: str,
    lease: MessageLease,
    seconds: float,
    by: MessageLease,
    *,
    waits: bool = True,
) -> dt.datetime | None:
    """Have a lease end in so many seconds from now (0: now), and ``by``, its `successor`, take its place.

    Return its end. It may be done twice with the same one. None: the lease has ended, and nothing is changed.

    Raises:
        RowHeld: another transaction has the row; without ``waits``.
    """
    statement = sql.extend(schema, waits=waits, **_one(lease), next=by.number, invisible=seconds)
    if rows := _rows(connection, statement, waits=waits):
        end: dt.datetime = rows[0][0]
        return end
    if not waits:
        _refuse_held(connection, schema, [lease, by])
    return None


def _refuse_held(connection: Connection, schema: str, leases: Sequence[MessageLease]) -> dict[MessageLease, Status]:
    """Raise RowHeld if one of these leases holds its message still; return where it stands else."""
    statuses = _statuses(connection, schema, leases)
    if Status.TAKEN in statuses.values():
        raise RowHeld
    return statuses


def renew(connection: Connection, schema: str, leases: Sequence[MessageLease], seconds: float) -> set[UUID]:
    """Have leases of one group and topic end in so many seconds from now, or later, each under its number.

    One whose row another transaction has, which settles it, stays as it is. Return the messages of those that hadn't
    ended.
    """
    if not leases:
        return set()
    statement = sql.renew(schema, waits=False, **_of(leases), **_columns(leases), invisible=seconds)
    there = {id_ for (id_,) in _rows(connection, statement, waits=False)}
    if left := [each for each in leases if each.message_id not in there]:
        statuses = _statuses(connection, schema, left)
        there |= {each.message_id for each, status in statuses.items() if status is Status.TAKEN}
    return there


def give_back(connection: Connection, schema: str, leases: Sequence[MessageLease]) -> None:
    """Have messages of one group and topic due again as they were: no client has seen them, so it was no attempt."""
    if leases:
        statement = sql.give_back(schema, waits=False, **_of(leases), **_columns(leases))
        _rows(connection, statement, waits=False)


def fail(
    connection: Connection,
    of_group: Subscription,
    settings: Settings,
    lease: MessageLease,
    failure: HandlerFailure,
    message: Message | None = None,
    *,
    waits: bool = True,
) -> Settlement:
    """Write that an attempt under a lease failed: the message is due again later, or parked, by the group's rules.

    As of a handler: a failure that says ``PARKED`` parks it at once, ``delay`` stands over the table of the group.
    ``message`` is for the callback that is told of parked ones. Where it still holds its key, the client's later
    messages of the same take are given back, and wait behind it: they may not be handled, so it is no attempt. One that
    is said again, while the message waits or is parked since, is told so.

    Raises:
        RowHeld: another transaction has the row; without ``waits``.
    """
    rows = _rows(connection, sql.lock(settings.schema, waits=waits, **_one(lease)), waits=waits)
    if not rows:
        statuses = _refuse_held(connection, settings.schema, [lease]) if not waits else {}
        status = statuses.get(lease)
        return Settlement.BEFORE if status is not None and status.tried and status.open else Settlement.LATE
    attempts, key, turn, taker, take_id = rows[0]
    row = record(connection, of_group, settings, lease, failure, attempts=attempts + 1, key=key, message=message)
    if key is not None and row.holds:
        of_take = {"key": key, "turn": turn, "position": lease.position, "taker": taker, "take_id": take_id}
        execute(connection, sql.hold_back(settings.schema, **_named(lease), **of_take))
    return Settlement.DONE


def record(
    connection: Connection,
    of_group: Subscription,
    settings: Settings,
    lease: MessageLease,
    failure: HandlerFailure,
    *,
    attempts: int,
    key: str | None,
    message: Message | None = None,
    worker: str | None = None,
) -> InboxUpdate:
    """Write what follows from a failed attempt at a message, whose row the transaction has locked; return its row.

    ``key`` is the one that the row holds back, ``worker`` the client that has had it.
    """
    of = GroupQueue(settings.schema, lease.group, lease.topic, lease.queue)
    entry = Entry(lease.position, lease.message_id, message)
    row = subscription.settle(of_group, entry, attempts, failure.about(message), settings.retry_jitter)
    values = {"status": row.status, "attempts": row.attempts, "delay": row.delay, "error": row.error, "kind": row.kind}
    statements: list[Statement] = [
        sql.fail(settings.schema, group=lease.group, id=lease.message_id, holds=row.holds, **values),
        write_attempt(of, row, worker or process_name()),
    ]
    if row.status == Status.PARKED:
        found = message or _message(connection, of_group, settings.schema, lease)
        reason = row.error or row.kind or ""
        statements += tell_parked(settings.schema, of_group, lease.message_id, found, reason, attempts)
    if key is not None and not row.holds:
        statements.append(key_order.release_key(settings.schema, lease.group, lease.topic, key))
    execute(connection, *statements)
    after_commit(connection, partial(emit, subscription.event_of(of, row)))
    return row


def _message(connection: Connection, of_group: Subscription, schema: str, lease: MessageLease) -> Message | None:
    """Return a message that is parked, if a callback is told of it and its topic is in the same database."""
    if parked_callback(of_group) is None or of_group.sources != (None,):
        return None
    (rows,) = execute(connection, message_by_id(schema, id=lease.message_id, **EVERYTHING))
    return to_entry(rows[0], of_group, lease.queue).message if rows else None


def give_up(
    connection: Connection,
    schema: str,
    group: str,
    topic: str,
    taker: str,
    seconds: float = 1.0,
    longest: float = LONGEST_LEASE,
) -> int:
    """Have all that a client has taken of a topic due again in so many seconds: it ends. Return how many they are.

    What is taken for more than ``longest`` seconds from now stays so: in SQL, its handler has asked for more time. One
    whose row another transaction has stays as it is.
    """
    values = {"group": group, "topic": topic, "taker": taker, "seconds": seconds, "longest": longest}
    return len(_rows(connection, sql.give_up(schema, **values), waits=False))


def _one(lease: MessageLease) -> dict[str, Any]:
    return {**_of([lease]), **_columns([lease])}


def _named(lease: MessageLease) -> dict[str, Any]:
    return {"group": lease.group, "topic": lease.topic, "id": lease.message_id}
