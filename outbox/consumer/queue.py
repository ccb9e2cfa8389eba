"""Consume one queue of one group: lock, inbox rows, handlers and offset in one transaction.

Nothing is leased: whoever holds the queue's advisory lock, which ends with the transaction, is its consumer for
this transaction. What was read ahead stays valid as long as the offset in the database is where this worker
left it, since messages never change.

Crashes leave no trace of their own, because everything rolls back with them. So a worker that takes a queue for
the first time (or after losing its connection) first commits a claim beside the offset. A claim found there by
the next one says that a start had no end; from then on messages run one by one, each with its own claim, until
the one that kills its worker is known, and parked.

From rows to messages.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NoReturn
from uuid import UUID

from outbox.consumer import sql
from outbox.consumer.handler import CRASH_KIND, Failure, HandlerSession, counts_of, failure_from, settle
from outbox.consumer.subscription import Subscription
from outbox.database.at_commit import at_commit
from outbox.database.execute import Row, Statement, execute, is_lost, read_source
from outbox.database.session import commit
from outbox.database.sql import GroupQueue, try_lock
from outbox.errors import MessagesPruned
from outbox.message.model import Counts, Message, Status
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: Bytes of the SHA-256 of a body that the inbox keeps, for reconciliation.
DIGEST_BYTES = 16


@dataclass(slots=True)
class Entry:
    """A message in a queue; ``message`` is None where the group's filter leaves it out."""

    position: int
    id: UUID
    message: Message | None

    def digest(self) -> bytes | None:
        """Return the first 16 bytes of the SHA-256 of the body as it arrived; None if it wasn't read."""
        return hashlib.sha256(self.message.raw).digest()[:DIGEST_BYTES] if self.message else None


def next_messages(subscription: Subscription, settings: Settings, queue: int, position: int) -> Statement:
    """Return the statement that reads the messages of a queue after ``position``."""
    return sql.messages_after(
        settings.schema,
        subscription.topic,
        queue,
        position,
        max(settings.read_ahead, subscription.batch),
        settings.read_ahead_bytes,
        *filter_of(subscription),
    )


def filter_of(subscription: Subscription) -> tuple[list[str] | None, list[str] | None]:
    """Return the tags and the key patterns that a group takes; None: all."""
    return (
        None if subscription.tags is None else sorted(subscription.tags),
        None if subscription.keys is None else [like(pattern) for pattern in subscription.keys],
    )


def to_entries(rows: list[Row], subscription: Subscription, queue: int, position: int) -> list[Entry]:
    """Return what `next_messages` has read.

    Raises:
        MessagesPruned: the next message is gone, and the subscription says to stop then.
    """
    topic = subscription.topic
    entries = [to_entry(row, topic, queue, subscription) for row in rows]
    if entries and entries[0].position != position + 1 and subscription.on_pruned == "stop":
        raise MessagesPruned(
            f"group {subscription.group!r} fell behind: of topic {topic!r}, queue {queue}, the messages "
            f"{position + 1} to {entries[0].position - 1} were pruned before they were read; find out what they were "
            "(the producer's retention is too short for this group), then go on with on_pruned='skip'"
        )
    return entries


def to_entry(row: Row, topic: str, queue: int, subscription: Subscription) -> Entry:
    """Return one row of `inbox.messages_after` as an entry."""
    position, id_, send_number, visible_at, key, tag, headers, content_type, body, born_at, matches, *_ = row
    if not matches:
        return Entry(position, id_, None)
    message = Message(
        id_,
        topic,
        queue,
        position,
        key,
        tag,
        content_type,
        body,
        born_at,
        visible_at,
        send_number,
        1,
        json.loads(headers) if headers else {},
        subscription.model,
    )
    return Entry(position, id_, message)


def like(pattern: str) -> str:
    """Return a key pattern with ``*`` as a LIKE pattern that matches nothing else."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%")


class State(enum.Enum):
    """How a step left the queue."""

    WORKED = enum.auto()  # there may be more
    EMPTY = enum.auto()
    LOCKED = enum.auto()  # another worker has it
    BLOCKED = enum.auto()  # ordered, and the first message waits for its retry


class _Failed(Exception):
    """Undo the transaction: an attempt failed."""

    def __init__(self, entry: Entry, attempts: int, failure: Failure, together: int) -> None:
        self.entry, self.attempts, self.failure, self.together = entry, attempts, failure, together


class _Known(Exception):
    """Undo the transaction, and look again: the inbox has come to know one of the messages meanwhile."""


class QueueConsumer:
    """One queue of one group, as one consuming thread sees it. Not thread-safe."""

    def __init__(self, subscription: Subscription, settings: Settings, queue: int) -> None:
        self._subscription = subscription
        self._settings = settings
        self._place = GroupQueue(settings.schema, subscription.group, subscription.topic, queue)
        self._lock = self._place.lock
        self._ahead: deque[Entry] = deque()
        self._position = -1
        self._fresh = True
        self._one_by_one = 0

    @property
    def position(self) -> int:
        """The offset after which this worker would go on; -1 if it doesn't know."""
        return self._position

    @property
    def has_read_ahead(self) -> bool:
        """Are there messages which are read and not yet consumed?"""
        return bool(self._ahead)

    def next_messages(self, position: int) -> Statement:
        """Return the statement that reads ahead from a position; its rows are for `read`."""
        return next_messages(self._subscription, self._settings, self._place.queue, position)

    def read(self, rows: list[Row], position: int) -> None:
        """Take what was read ahead after a position. It is used if the group's offset is there at the next step.

        Raises:
            MessagesPruned: the next message is gone, and the subscription says to stop then.
        """
        self._ahead = deque(to_entries(rows, self._subscription, self._place.queue, position))
        self._position = position

    def forget(self) -> None:
        """Drop what was read ahead, and claim again at the next step: the connection was lost."""
        self._ahead.clear()
        self._position = -1
        self._fresh = True

    def step(self, connection: Connection, source: Connection) -> tuple[State, Counts]:
        """Run one transaction: a batch, or a single message where one failed before."""
        try:
            with connection.begin():
                return self._step(connection, source)
        except _Failed as failed:
            if failed.together > 1:
                # Who of the batch it was is found out one by one.
                self._one_by_one = self._subscription.batch
                return State.WORKED, Counts(more=True)
            return self._record(connection, failed)
        except _Known:
            self._ahead.clear()
            return State.WORKED, Counts(more=True)
        except BaseException as error:
            # What is no Exception ends the thread or the process: a start that had no end.
            if is_lost(connection) or not isinstance(error, Exception):
                self.forget()
            raise

    def _step(self, connection: Connection, source: Connection) -> tuple[State, Counts]:
        size = 1 if self._one_by_one else self._subscription.batch
        candidates = list(islice(self._ahead, size))
        locked, offsets, rows = execute(
            connection,
            try_lock(self._lock),
            sql.offset(self._place),
            sql.known(self._place, [entry.id for entry in candidates]),
        )
        if not locked[0][0]:
            self._ahead.clear()
            self._position = -1
            return State.LOCKED, Counts()
        position, claims = offsets[0] if offsets else (0, 0)
        if position != self._position or not candidates:
            (messages,) = read_source(source, self.next_messages(position))
            self.read(messages, position)
            candidates = list(islice(self._ahead, size))
            if not candidates:
                return State.EMPTY, Counts()
            (rows,) = execute(connection, sql.known(self._place, [entry.id for entry in candidates]))
        known = {row[0]: row for row in rows}
        if (ended := self._without_handler(connection, candidates[0], known)) is not None:
            return ended
        if self._fresh:
            self._fresh = False
            if claims:
                self._one_by_one = self._subscription.batch
            at_commit(connection, sql.append_offset(self._place, position, claims + 1))
            return State.WORKED, Counts(more=True)
        if claims > self._settings.max_claims and self._is_to_run(candidates[0], known):
            return self._park_crasher(connection, candidates[0], known, claims)
        return self._consume(connection, candidates, known)

    def _without_handler(
        self, connection: Connection, entry: Entry, known: dict[object, Row]
    ) -> tuple[State, Counts] | None:
        """Return how the step ends where the first message isn't to be handled now; None where it may be."""
        if self._is_sent_again(entry, known):
            return self._retry_resent(connection, entry)
        if self._waits(entry, known):
            return State.BLOCKED, Counts()
        return None

    def _is_sent_again(self, entry: Entry, known: dict[object, Row]) -> bool:
        """Tell whether this is a newer send of a message that the group has failed or parked."""
        if entry.id not in known or entry.message is None or entry.message.send_number == 1:
            return False
        _, status, _, _, queue, position, discarded = known[entry.id]
        tries = status == Status.FAILED or (status == Status.PARKED and not discarded)
        return tries and (queue, position) != (self._place.queue, entry.position)

    def _retry_resent(self, connection: Connection, entry: Entry) -> tuple[State, Counts]:
        """Have a message that was sent again tried again: by a retry, or (ordered) by the next step.

        In a transaction that does nothing else, so that a handler which fails can't undo it.
        """
        if not execute(connection, sql.retry_resent(self._place, entry.id, entry.position))[0]:
            # A retry runs its handler, or an operator acts on it. Going past it now would lose this send.
            self._ahead.clear()
            self._position = -1
            return State.LOCKED, Counts()
        if self._subscription.ordered:
            return State.WORKED, Counts(more=True)
        left = max(self._one_by_one - 1, 0)
        at_commit(connection, sql.append_offset(self._place, entry.position, 1 if left else 0))
        commit(connection)
        self._advance(entry.position)
        self._one_by_one = left
        return State.WORKED, Counts(taken=1)

    def _waits(self, entry: Entry, known: dict[object, Row]) -> bool:
        """Tell whether the queue is ordered and its first message is to be retried later."""
        _, status, _, wait, *_ = known.get(entry.id, (None, None, 0, 0.0))
        return self._subscription.ordered and status == Status.FAILED and wait > 0

    def _is_to_run(self, entry: Entry, known: dict[object, Row]) -> bool:
        if entry.id in known:
            return self._subscription.ordered and known[entry.id][1] == Status.FAILED
        return entry.message is not None

    def _consume(
        self, connection: Connection, candidates: list[Entry], known: dict[object, Row]
    ) -> tuple[State, Counts]:
        todo: dict[object, Entry] = {}
        passed: list[Entry] = []
        attempt, known_failed = 1, False
        for entry in candidates:
            if self._is_sent_again(entry, known):
                break
            _, status, attempts, *_ = known.get(entry.id, (None, None, 0, 0.0))
            if status == Status.FAILED and self._subscription.ordered:
                if passed:
                    break
                attempt, known_failed = attempts + 1, True
                todo[entry.id] = entry
                passed.append(entry)
                break
            if status is None and entry.message is not None:
                # A message that was resent may stand in the batch twice.
                todo.setdefault(entry.id, entry)
            passed.append(entry)
        entries = list(todo.values())
        if (
            known_failed
            and not execute(connection, sql.lock_failed(self._settings.schema, self._place.group, entries[0].id))[0]
        ):
            # Whoever runs a failed message holds its row, as in a retry. Somebody else has it, or has just settled it:
            # what the handler did would stay, though the row says something else.
            self._ahead.clear()
            self._position = -1
            return State.LOCKED, Counts()
        self._handle(connection, entries, attempt)
        return self._close(connection, entries, passed, attempt, known_failed)

    def _handle(self, connection: Connection, entries: list[Entry], attempt: int) -> None:
        messages = [entry.message for entry in entries if entry.message is not None]
        if not messages:
            return
        messages[0].attempt = attempt
        session = HandlerSession(connection, self._subscription)
        try:
            if self._subscription.takes_batch:
                if (failure := session.handle(messages)) is not None:
                    raise _Failed(entries[0], attempt, failure, len(entries))
            else:
                for entry, message in zip(entries, messages, strict=True):
                    if (failure := session.handle(message)) is not None:
                        raise _Failed(entry, attempt, failure, len(entries))
            if (failure := session.finish()) is not None:
                raise _Failed(entries[0], attempt, failure, len(entries))
        finally:
            session.close()

    def _close(
        self, connection: Connection, entries: list[Entry], passed: list[Entry], attempt: int, known_failed: bool
    ) -> tuple[State, Counts]:
        place, last = self._place, passed[-1].position
        if known_failed:
            entry = entries[0]
            row = sql.Settled(entry.id, entry.position, Status.CONSUMED.value, attempt, entry.digest(), None)
            at_commit(connection, sql.settle(place, row))
        elif entries:
            ids, positions, digests = [], [], []
            for entry in entries:
                ids.append(entry.id)
                positions.append(entry.position)
                digests.append(entry.digest())
            at_commit(connection, sql.consumed(place, ids, positions, digests))
        left = max(self._one_by_one - len(passed), 0)
        at_commit(connection, sql.append_offset(place, last, 1 if left else 0))
        try:
            commit(connection)
        except Exception as error:
            self._refused(connection, error, entries, attempt)
        self._advance(last)
        self._one_by_one = left
        return State.WORKED, Counts(taken=len(passed), done=len(entries))

    def _refused(self, connection: Connection, error: Exception, entries: list[Entry], attempt: int) -> NoReturn:
        """COMMIT failed: because of a row that came in between, a deferred constraint, a decision, or the server."""
        if is_lost(connection) or not entries:
            raise error
        diagnosis = getattr(getattr(error, "orig", None), "diag", None)
        if getattr(diagnosis, "constraint_name", None) == "pk_consumer_message":
            raise _Known from error
        raise _Failed(entries[0], attempt, failure_from(error), len(entries)) from error

    def _record(self, connection: Connection, failed: _Failed) -> tuple[State, Counts]:
        """Write down a failed attempt, in a transaction of its own."""
        entry, subscription = failed.entry, self._subscription
        row = settle(
            subscription,
            entry.id,
            entry.position,
            entry.digest(),
            failed.attempts,
            failed.failure,
            self._settings.retry_jitter,
        )
        with connection.begin():
            locked, offsets = execute(connection, try_lock(self._lock), sql.offset(self._place))
            position = offsets[0][0] if offsets else 0
            if not locked[0][0] or position != self._position:
                # Another worker went on from here; what this message came to is now its affair.
                self._ahead.clear()
                return State.LOCKED, Counts()
            blocked = subscription.ordered and row.status == Status.FAILED
            at_commit(connection, sql.settle(self._place, row))
            if blocked:
                # This start had an end: whoever takes the queue for the next attempt begins to count anew.
                at_commit(connection, sql.drop_claims(self._place, position))
            else:
                self._one_by_one = max(self._one_by_one - 1, 0)
                at_commit(connection, sql.append_offset(self._place, entry.position, 1 if self._one_by_one else 0))
        if not blocked:
            self._advance(entry.position)
        return (State.BLOCKED if blocked else State.WORKED), counts_of(row)

    def _advance(self, position: int) -> None:
        while self._ahead and self._ahead[0].position <= position:
            self._ahead.popleft()
        self._position = position

    def _park_crasher(
        self, connection: Connection, entry: Entry, known: dict[object, Row], claims: int
    ) -> tuple[State, Counts]:
        error = f"started {claims - 1} times without ever finishing: the worker died each time"
        attempts = known[entry.id][2] if entry.id in known else 0
        row = sql.Settled(
            entry.id, entry.position, Status.PARKED.value, attempts, entry.digest(), error, kind=CRASH_KIND
        )
        at_commit(connection, sql.settle(self._place, row))
        at_commit(connection, sql.append_offset(self._place, entry.position, 1))
        self._one_by_one = max(self._one_by_one, 1)
        self._ahead.clear()
        self._position = -1
        return State.WORKED, counts_of(row)
