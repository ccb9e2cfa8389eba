"""What an operator does about an undecided half: decide it, set its counter back, or have it checked again.

Each act runs in the caller's transaction, and is recorded in `audit` there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.check.asking import Asker
from outbox.check.check_pass import question_of, worker_name
from outbox.check.checker import Checker
from outbox.check.interview import Interview
from outbox.decide import already, decide
from outbox.errors import CheckRefused, DecisionRefused, HalfNotFound
from outbox.model import Answer, Decision, Resolution
from outbox.settings import Settings
from outbox.store import check as store
from outbox.store.execute import Row, Statement, execute
from outbox.store.operator import audit

if TYPE_CHECKING:
    from sqlalchemy import Connection

_ASK_ALWAYS = 2**31 - 1


def resolve(
    connection: Connection,
    settings: Settings,
    half_id: UUID,
    resolution: Resolution,
    *,
    actor: str,
    reason: str,
    force: bool = False,
) -> Decision:
    """Decide an undecided half, parked or not.

    Raises:
        AlreadyCommitted, AlreadyRolledBack: somebody decided otherwise before.
        DecisionRefused: no reason; or a fenced half would be committed whose business change never was, and ``force``
            isn't set.
        HalfNotFound: no half message has this id.
    """
    if not reason.strip():
        raise DecisionRefused(f"give a reason for deciding half message {half_id}")
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
            audit(settings.schema, actor, "resolve", str(half_id), reason, {"resolution": resolution, "force": force}),
        )
    return decision


def reset(connection: Connection, settings: Settings, half_id: UUID, *, actor: str, reason: str) -> None:
    """Set the counter of an undecided half back to 0 and have it checked by the next pass (RocketMQ: resume).

    Raises:
        AlreadyCommitted, AlreadyRolledBack, HalfNotFound
    """
    _change(connection, settings, half_id, store.reset(settings.schema, half_id))
    execute(connection, audit(settings.schema, actor, "reset", str(half_id), reason))


def request_check(connection: Connection, settings: Settings, half_id: UUID, *, actor: str, reason: str) -> None:
    """Have the next pass check an undecided half; one that is parked exactly once more.

    Raises:
        AlreadyCommitted, AlreadyRolledBack, HalfNotFound
    """
    _change(connection, settings, half_id, store.once_more(settings.schema, half_id))
    execute(connection, audit(settings.schema, actor, "check", str(half_id), reason, {"asked": "next pass"}))


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
        AlreadyCommitted, AlreadyRolledBack, HalfNotFound
        CheckRefused: no checker for its topic, or it is being asked at this moment.
    """
    answer = _by_fence(connection, settings, half_id)
    if answer is None:
        answer = _by_checker(connection, settings, checkers, asker, half_id)
    with connection.begin():
        result = {"answer": answer.resolution, "error": (answer.error or "").partition("\n")[0] or None}
        execute(connection, audit(settings.schema, actor, "check", str(half_id), reason, result))
    return answer


def _by_fence(connection: Connection, settings: Settings, half_id: UUID) -> Answer | None:
    """Return the answer of the fence; None if the half has none."""
    began = time.monotonic()
    with connection.begin():
        _undecided(connection, settings, half_id)
        (rows,) = execute(connection, store.this_fenced(settings.schema, half_id))
        if not rows:
            return None
        (((running, decided),),) = execute(
            connection, store.try_fences(settings.schema, [half_id], settings.check_interval, worker_name())
        )
    seconds = time.monotonic() - began
    if running:
        return Answer(Resolution.UNKNOWN, store.RUNNING, seconds)
    if decided:
        return Answer(Resolution.ROLLBACK, None, seconds)
    with connection.begin():
        _, resolution, by, *_ = _state(connection, settings, half_id)
    return Answer(Resolution(resolution), f"the {by} decided meanwhile", seconds, by)


def _by_checker(
    connection: Connection, settings: Settings, checkers: Mapping[str, Checker], asker: Asker, half_id: UUID
) -> Answer:
    with connection.begin():
        topic = _undecided(connection, settings, half_id)
        if (checker := checkers.get(topic)) is None:
            raise CheckRefused(
                f"half message {half_id} can't be checked here: no checker is registered for topic {topic!r}; "
                f"register one with @outbox.checker({topic!r}), or decide the half yourself"
            )
        question = question_of(checker)
        (rows,) = execute(
            connection,
            store.claim_this(settings.schema, half_id, store.Question(_ASK_ALWAYS, question.lease, question.worker)),
        )
        if not rows:
            raise CheckRefused(f"half message {half_id} is being checked at this moment; look again in a while")
    interview = Interview.of(checker, settings, rows[0])
    asker.begin(interview)
    while ended := asker.next_ended(wait=True):
        each, unrecorded = ended
        if unrecorded is not None:
            each.record_unknown(connection, unrecorded)
    assert interview.answer is not None  # noqa: S101 - ended, and recorded by itself or here
    return interview.answer


def _change(connection: Connection, settings: Settings, half_id: UUID, statement: Statement) -> None:
    (changed,) = execute(connection, statement)
    if not changed:
        _undecided(connection, settings, half_id)
        raise HalfNotFound(half_id)


def _undecided(connection: Connection, settings: Settings, half_id: UUID) -> str:
    """Return the topic of a half that is undecided; raise the error that tells why it isn't."""
    topic: str
    topic, resolution, by, at, *_ = _state(connection, settings, half_id)
    if resolution is not None:
        raise already(Decision(half_id, Resolution(resolution), by, at, first=False))
    return topic


def _state(connection: Connection, settings: Settings, half_id: UUID) -> Row:
    (rows,) = execute(connection, store.state(settings.schema, half_id))
    if not rows:
        raise HalfNotFound(half_id)
    return rows[0]
