"""Call the application for parked letters: for a message in the database of its group, for a half in its producer's.

A pass looks at parked messages and halves and calls `Outbox.on_parked` for each letter, in a transaction of its own
that also writes the call into the audit: once for a message and a group, and once for a half, for ever. For a letter
that got another try and is parked again there is no second call; an operator has it in hand.

**The races.** The worker that calls holds an advisory lock on the letter until its transaction ends. Another worker
that finds it taken goes on to the next letter. The one that gets it looks, in a statement after that, whether the
letter is still parked and without a call. What the function raises undoes its transaction, and so does the end of its
process: the next pass calls again. An operator isn't kept waiting by a call: a letter retried or decided while the
function runs was parked when it was called.

**The cost** of a pass is one look into the audit for each parked letter; others cost nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from outbox.acts.changes import Target
from outbox.calling.engine import RecordedCall
from outbox.calling.function import CalledFunction
from outbox.consumer.sql import message_by_id
from outbox.consumer.subscription import EVERYTHING, Subscription, to_entry
from outbox.database.at_commit import at_commit
from outbox.database.duty import Duty, Post, Task, alone
from outbox.database.execute import execute, lock_key, read_source
from outbox.database.sql import audit, plan_by_index, try_lock, wait_at_most
from outbox.dead_letter import sql
from outbox.message.answer import CALLBACK, CalledKind
from outbox.message.model import Counts, DeadLetter, Orphan, read_headers
from outbox.telemetry.events import DeadLetterAnnounced, DeadLetterCallbackFailed
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.execute import Statement
    from outbox.settings import Settings

#: The actor of the calls, in the audit.
ACTOR = "worker"
#: How often (seconds) the application is called for parked halves and messages.
INTERVAL = 30.0
#: How long (seconds) a statement of the function's may wait for a lock.
_PATIENCE = 10.0
#: Letters that are read at a time, with their bodies.
_PAGE = 20
_FIRST = UUID(int=0)


@dataclass(frozen=True, slots=True)
class ParkedCallback(CalledFunction):
    """The function called when a message or a half of a topic is parked: ``function(letter, session)``."""

    decorator: ClassVar[str] = "on_parked"
    kind: ClassVar[CalledKind] = CALLBACK
    forms: ClassVar[tuple[tuple[str, ...], ...]] = (("letter", "session"),)


def announce_messages_once(
    connection: Connection,
    source: Connection,
    settings: Settings,
    callback: ParkedCallback,
    subscription: Subscription,
    *,
    stopping: Callable[[], bool] = lambda: False,
) -> Counts:
    """Call for the parked messages of one group.

    Neither connection is in a transaction; ``source`` is on the producer's database (the same object where that is the
    same one), and is read before any transaction begins. Returns ``taken`` letters, ``done`` those called for, and
    ``failed`` those whose call was undone.
    """
    schema, group, topic = settings.schema, subscription.group, subscription.topic

    def read(after: UUID) -> Iterable[DeadLetter[Any]]:
        page = sql.parked_messages(schema, group=group, topic=topic, after=after, limit=_PAGE)
        with connection.begin():
            _, rows = execute(connection, plan_by_index(), page)
        bodies = [message_by_id(schema, id=row[0], **EVERYTHING) for row in rows]
        for (id_, queue, attempts, error, parked_at), found in zip(rows, read_source(source, *bodies), strict=True):
            message = None
            if found and (entry := to_entry(found[0], subscription, queue)).message is not None:
                message = replace(entry.message, attempt=attempts, model=callback.model or subscription.model)
            yield DeadLetter(id_, topic, group, error, attempts, parked_at, message)

    def stands(letter: DeadLetter[Any]) -> Statement:
        return sql.message_stands(schema, group=group, id=letter.id)

    return _announce_all(connection, settings, callback, read, stands, stopping)


def announce_halves_once(
    connection: Connection,
    settings: Settings,
    callback: ParkedCallback,
    *,
    stopping: Callable[[], bool] = lambda: False,
) -> Counts:
    """Call for the parked halves of a topic, on a connection that isn't in a transaction; counts as above."""
    schema, topic = settings.schema, callback.topic

    def read(after: UUID) -> Iterable[DeadLetter[Any]]:
        with connection.begin():
            page = sql.parked_halves(schema, topic=topic, after=after, limit=_PAGE)
            _, rows = execute(connection, plan_by_index(), page)
        for id_, checks, reason, parked_at, key, tag, stored_headers, content_type, body, born_at, age in rows:
            read_as = callback.model, callback.codecs
            headers, encoding = read_headers(stored_headers)
            known = id_, topic, key, tag, headers, content_type, body, born_at, dt.timedelta(seconds=age), checks
            yield DeadLetter(id_, topic, None, reason, checks, parked_at, Orphan(*known, *read_as, encoding))

    def stands(letter: DeadLetter[Any]) -> Statement:
        return sql.half_stands(schema, id=letter.id)

    return _announce_all(connection, settings, callback, read, stands, stopping)


def _announce_all(
    connection: Connection,
    settings: Settings,
    callback: ParkedCallback,
    read: Callable[[UUID], Iterable[DeadLetter[Any]]],
    stands: Callable[[DeadLetter[Any]], Statement],
    stopping: Callable[[], bool],
) -> Counts:
    counts, after = Counts(), _FIRST
    # By their ids: one that fails each time doesn't keep those after it.
    while letters := list(read(after)):
        for letter in letters:
            if stopping():
                return counts
            counts += _announce(connection, settings, callback, letter, stands(letter))
        after = letters[-1].id
    return counts


def _announce(
    connection: Connection, settings: Settings, callback: ParkedCallback, letter: DeadLetter[Any], stands: Statement
) -> Counts:
    facts: dict[str, Any] = {"message_id": letter.id, "topic": letter.topic, "group": letter.group or ""}
    run = _LetterCall(callback, settings.schema, letter, stands)
    run.hold(connection)
    if run.error is not None:
        emit(DeadLetterCallbackFailed(**facts, callback=callback.name, error=run.error))
        return Counts(taken=1, failed=1)
    if run.done:
        emit(DeadLetterAnnounced(**facts, callback=callback.name))
    return Counts(taken=int(run.done), done=int(run.done))


@dataclass(slots=True, eq=False)
class _LetterCall(RecordedCall[DeadLetter[Any]]):
    """One call for a letter, whose record is in the audit."""

    schema: str
    letter: DeadLetter[Any]
    stands: Statement

    def begin(self, connection: Connection) -> DeadLetter[Any] | None:
        """Take the letter's lock; return the letter, None if another worker has it, or it isn't to be called for."""
        # No end for a transaction that is idle: the function may take its time.
        lock = try_lock(lock_key(sql.ACTION, self.schema, self._target), setting="NULL")
        ((free, _),), rows, _ = execute(connection, lock, self.stands, wait_at_most(_PATIENCE))
        return self.letter if free and rows else None

    def end(self, connection: Connection, argument: DeadLetter[Any], _: Any) -> None:
        """Write the call into the audit, with the COMMIT."""
        done = {"function": self.function.name, "topic": argument.topic}
        row = audit(self.schema, ACTOR, sql.ACTION, self._target, "it is parked", done, {"via": "worker"})
        at_commit(connection, row)

    @property
    def _target(self) -> str:
        return Target(self.letter.id, self.letter.group).audited


def _tasks(at: Post) -> Iterator[Task]:
    """Have the application called by the workers that check and retry, where a letter is parked."""
    for callback in at.outbox.functions.of(ParkedCallback).values():
        # A lane for each: the application's functions may be slow to return.
        how: Any = {"every": INTERVAL, "is_async": callback.is_async}
        if "check" in at.roles and "producer" in at.parts:
            one_pass = alone(announce_halves_once, at.settings, callback)
            yield Task(name=f"dead letters {callback.topic}, halves", one_pass=one_pass, parts=("producer",), **how)
        for (topic, group), subscription in at.outbox.functions.of(Subscription).items():
            if topic == callback.topic and "retry" in at.roles:
                yield Task(
                    name=f"dead letters {topic} of {group}",
                    one_pass=partial(_messages, at.settings, callback, subscription),
                    source=subscription.source,
                    group=group,
                    parts=("consumer",),
                    **how,
                )


def _messages(
    settings: Settings,
    callback: ParkedCallback,
    subscription: Subscription,
    connection: Connection,
    source: Connection,
    stopping: Callable[[], bool],
) -> Counts:
    return announce_messages_once(connection, source, settings, callback, subscription, stopping=stopping)


DUTIES = (
    Duty(
        "dead letters",
        "Calls the application for what is parked.",
        """
        producer: worker
        SELECT ON half_check half_message
        SELECT(target action) INSERT ON audit
        consumer: consumer
        SELECT ON consumer_message
        SELECT(target action) INSERT ON audit
        """,
        tasks=_tasks,
        functions="parked_callbacks",
    ),
)
