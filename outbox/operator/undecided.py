"""What an operator does about an undecided half: decide it, set its counter back, or have it checked again.

Each act is recorded in `audit`, in the transaction in which it is done; one that came too late, or was refused, leaves
nothing there. `resolve`, `reset`, `reset_parked` and `request_check` run in the caller's transaction; ``origin`` is by
which way the act came.

Give a parked message back to its consumer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.check import sql as check_sql
from outbox.check.asker import Asker, Interview
from outbox.check.checker import Checker
from outbox.check.once import question_of, worker_name
from outbox.consumer import sql as consumer_sql
from outbox.database import sql as database_sql
from outbox.database.decision import already, decide
from outbox.database.execute import Row, Statement, execute
from outbox.database.failure import LOCK_NOT_AVAILABLE, sqlstate
from outbox.database.sql import audit, wait_at_most
from outbox.errors import CheckRefused, DecisionRefused, HalfNotFound, NotParked
from outbox.message.model import Answer, Decision, Resolution
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long (seconds) an act waits for a transaction that is deciding the same half.
PATIENCE = 10.0


def resolve(
    connection: Connection,
    settings: Settings,
    half_id: UUID,
    resolution: Resolution,
    *,
    actor: str,
    reason: str,
    force: bool = False,
    origin: Mapping[str, str] | None = None,
) -> Decision:
    """Decide an undecided half, parked or not.

    Raises:
        AlreadyCommitted, AlreadyRolledBack: somebody decided otherwise before.
        DecisionRefused: no reason; or a fenced half would be committed whose business change never was, and ``force``
            isn't set.
        HalfNotFound: no half message has this id.
    """
    _need_reason(reason, f"deciding half message {half_id}")
    if resolution is Resolution.COMMIT and not force and _state(connection, settings, half_id)[5]:
        raise DecisionRefused(
            f"half message {half_id} is fenced and has no op, so its business change isn't committed: committing the "
            "half would tell the consumers of a change that was never made; roll it back, or use force"
        )
    decision = decide(connection, settings.schema, half_id, resolution, "operator")
    if decision.resolution is not resolution:
        raise already(decision)
    if decision.first:
        execute(
            connection,
            audit(
                settings.schema,
                actor,
                resolution.value,
                str(half_id),
                reason,
                {"resolution": resolution, "force": force},
                origin,
            ),
        )
    return decision


def reset(
    connection: Connection,
    settings: Settings,
    half_id: UUID,
    *,
    actor: str,
    reason: str,
    origin: Mapping[str, str] | None = None,
) -> None:
    """Set the counter of an undecided half back to 0 and have it checked by the next pass (RocketMQ: resume).

    Raises:
        AlreadyCommitted, AlreadyRolledBack, HalfNotFound: it isn't undecided.
        DecisionRefused: no reason.
    """
    _need_reason(reason, f"resetting half message {half_id}")
    _change(connection, settings, half_id, check_sql.reset(settings.schema, half_id))
    execute(connection, audit(settings.schema, actor, "reset", str(half_id), reason, origin=origin))


def reset_parked(
    connection: Connection,
    settings: Settings,
    topic: str | None,
    *,
    actor: str,
    reason: str,
    after: UUID | None = None,
    limit: int = 1000,
) -> list[UUID]:
    """Reset parked halves of a topic (None: of all), ``limit`` at most, above the id ``after``; return their ids.

    Those that a transaction is deciding at this moment are left out.

    Raises:
        DecisionRefused: no reason.
    """
    _need_reason(reason, "resetting parked half messages")
    (rows,) = execute(connection, check_sql.reset_parked(settings.schema, topic, after, limit, actor, reason))
    return [half_id for (half_id,) in rows]


def request_check(
    connection: Connection,
    settings: Settings,
    half_id: UUID,
    *,
    actor: str,
    reason: str,
    origin: Mapping[str, str] | None = None,
) -> None:
    """Have the next pass check an undecided half; one that is parked exactly once more.

    Raises:
        AlreadyCommitted, AlreadyRolledBack, HalfNotFound: it isn't undecided.
        DecisionRefused: no reason.
    """
    _need_reason(reason, f"checking half message {half_id}")
    _change(connection, settings, half_id, check_sql.once_more(settings.schema, half_id))
    asked = {"asked": "next pass"}
    execute(connection, audit(settings.schema, actor, "check", str(half_id), reason, asked, origin))


def check_now(
    connection: Connection,
    settings: Settings,
    checkers: Mapping[str, Checker],
    asker: Asker,
    half_id: UUID,
    *,
    actor: str,
    reason: str,
) -> Answer:
    """Check an undecided half here and now, parked or not, and return what came of it.

    ``connection`` must not be in a transaction.

    Raises:
        AlreadyCommitted, AlreadyRolledBack, HalfNotFound: it isn't undecided.
        CheckRefused: no checker for its topic, or it is being asked or decided at this moment.
        DecisionRefused: no reason.
    """
    answer = check_fence(connection, settings, half_id, actor=actor, reason=reason)
    if answer is None:
        interview = _claim(connection, settings, checkers, asker, half_id, actor, reason)
        answer = _hold(connection, asker, interview)
    return answer


def check_fence(connection: Connection, settings: Settings, half_id: UUID, *, actor: str, reason: str) -> Answer | None:
    """Check an undecided half here and now by its fence; None if it has none: then nothing was done.

    ``connection`` must not be in a transaction.

    Raises:
        AlreadyCommitted, AlreadyRolledBack, HalfNotFound: it isn't undecided.
        CheckRefused: it is being decided at this moment.
        DecisionRefused: no reason.
    """
    _need_reason(reason, f"checking half message {half_id}")
    began = time.monotonic()
    with connection.begin():
        _, fenced = _lock(connection, settings, half_id)
        if not fenced:
            return None
        (((running, decided),),) = execute(
            connection, check_sql.try_fences(settings.schema, [half_id], settings.check_interval, worker_name())
        )
        if not running and not decided:
            _undecided(connection, settings, half_id)
        resolution, error = (Resolution.UNKNOWN, check_sql.RUNNING) if running else (Resolution.ROLLBACK, None)
        result = {"asked": "fence", "answer": resolution, "error": error}
        execute(connection, audit(settings.schema, actor, "check", str(half_id), reason, result))
    return Answer(resolution, error, time.monotonic() - began)


def _claim(
    connection: Connection,
    settings: Settings,
    checkers: Mapping[str, Checker],
    asker: Asker,
    half_id: UUID,
    actor: str,
    reason: str,
) -> Interview:
    with connection.begin():
        topic, _ = _lock(connection, settings, half_id)
        if (checker := checkers.get(topic)) is None:
            raise CheckRefused(
                f"half message {half_id} can't be checked here: no checker is registered for topic {topic!r}; "
                f"register one with @outbox.checker({topic!r}), or decide the half yourself"
            )
        asker.make_runner(is_async=checker.is_async)
        rows, _ = execute(
            connection,
            check_sql.claim_this(settings.schema, half_id, question_of(checker)),
            audit(settings.schema, actor, "check", str(half_id), reason, {"asked": "checker"}),
        )
        if not rows:
            raise CheckRefused(f"half message {half_id} is being checked at this moment; look again in a while")
    return Interview.of(checker, settings, rows[0])


def _hold(connection: Connection, asker: Asker, interview: Interview) -> Answer:
    asker.begin(interview)
    _, unrecorded = asker.next_ended(wait=True) or (interview, None)
    if not interview.held:
        interview.give_back(connection)
        why = unrecorded.error if unrecorded else "everything is about to end"
        raise CheckRefused(f"nobody could be asked about half message {interview.half_id}: {why}")
    if unrecorded is not None:
        interview.record_unknown(connection, unrecorded)
    assert interview.answer is not None  # noqa: S101 - ended, and recorded by itself or here
    return interview.answer


def _need_reason(reason: str, act: str) -> None:
    if not reason.strip():
        raise DecisionRefused(f"give a reason for {act}")


def _lock(connection: Connection, settings: Settings, half_id: UUID) -> tuple[str, bool]:
    """Lock the check of a half; return its topic and whether it is fenced; raise what tells why it isn't undecided."""
    try:
        _, rows = execute(connection, wait_at_most(PATIENCE), check_sql.lock(settings.schema, half_id))
    except DBAPIError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        raise CheckRefused(
            f"half message {half_id} is being decided by a transaction that has not ended for {PATIENCE:g} s; "
            "look again in a while"
        ) from error
    if not rows:
        _undecided(connection, settings, half_id)
        raise HalfNotFound(half_id)
    topic, fenced = rows[0]
    return topic, fenced


def _change(connection: Connection, settings: Settings, half_id: UUID, statement: Statement) -> None:
    (changed,) = execute(connection, statement)
    if not changed:
        _undecided(connection, settings, half_id)
        raise HalfNotFound(half_id)


def _undecided(connection: Connection, settings: Settings, half_id: UUID) -> None:
    """Raise the error that tells why a half isn't undecided."""
    _, resolution, by, at, *_ = _state(connection, settings, half_id)
    if resolution is not None:
        raise already(Decision(half_id, Resolution(resolution), by, at, first=False))


def _state(connection: Connection, settings: Settings, half_id: UUID) -> Row:
    (rows,) = execute(connection, check_sql.state(settings.schema, half_id))
    if not rows:
        raise HalfNotFound(half_id)
    return rows[0]


def retry(connection: Connection, schema: str, group: str, message_id: UUID, *, actor: str, reason: str) -> None:
    """Make a parked message due now, with all its attempts, in the caller's transaction; record who and why.

    Raises:
        NotParked: the message isn't parked in this group; says what it is.
    """
    if not execute(connection, consumer_sql.retry(schema, group, message_id))[0]:
        (rows,) = execute(connection, consumer_sql.status(schema, group, message_id))
        what = f"it is {rows[0][0]}" if rows else "this group has never seen it"
        raise NotParked(f"message {message_id} can't be retried in group {group!r}: {what}")
    execute(connection, database_sql.audit(schema, actor, "retry", f"{group}/{message_id}", reason))
