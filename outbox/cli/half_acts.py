"""What ``outbox half`` does about half messages, and how it tells of it."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from outbox.cli.arguments import user_here
from outbox.cli.exits import Code, Failure, as_failure
from outbox.cli.output import Output, print_json, say
from outbox.cli.run import load
from outbox.errors import OutboxError
from outbox.message.model import Answer, Decision, Resolution

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded in the audit table.")]


@dataclass(frozen=True, slots=True)
class Act:
    """Who does it, and why."""

    actor: str
    reason: str

    @classmethod
    def of(cls, actor: str | None, reason: str) -> Act:
        """Return the act of the options.

        Raises:
            Failure: one of them is empty.
        """
        act = cls(user_here() if actor is None else actor.strip(), reason.strip())
        for name, text in (("--actor", act.actor), ("--reason", act.reason)):
            if not text:
                raise Failure(f"{name} is empty: the audit must tell who did it, and why", Code.USAGE)
        return act


@dataclass(slots=True)
class Outcome:
    """What became of several halves."""

    done: list[UUID] = field(default_factory=list)
    failed: dict[UUID, Failure] = field(default_factory=dict)


def check(connection: Connection, settings: Settings, half_id: UUID, act: Act) -> Answer | None:
    """Check a half by its fence; None if it has none: then the next pass of a worker was asked to."""
    from outbox.operator import undecided  # noqa: PLC0415

    answer = undecided.check_fence(connection, settings, half_id, actor=act.actor, reason=act.reason)
    if answer is None:
        with _acting(connection):
            undecided.request_check(connection, settings, half_id, actor=act.actor, reason=act.reason)
    return answer


def check_by_app(app: str, half_id: UUID, act: Act) -> Answer:
    """Check a half by its fence or by the application's checker, in the application's database."""
    from outbox.check.asker import Asker  # noqa: PLC0415
    from outbox.database import migration  # noqa: PLC0415 - Alembic is slow to import
    from outbox.operator import undecided  # noqa: PLC0415
    from outbox.worker.connections import Database, Runners  # noqa: PLC0415

    # What the application prints must not get among our data.
    with redirect_stdout(sys.stderr):
        outbox = load(app)
        # Not the engine itself: it may be an async one.
        database = Database(outbox.engine)
        asker = Asker(Runners(database, threading.Event()), 1)
        try:
            with closing(database.connect()) as connection:
                migration.require(connection, ("producer",), outbox.settings.schema)
                return undecided.check_now(
                    connection, outbox.settings, outbox.checkers, asker, half_id, actor=act.actor, reason=act.reason
                )
        finally:
            asker.end()


def reset(connection: Connection, settings: Settings, half_ids: Sequence[UUID], act: Act) -> Outcome:
    """Reset halves, each in a transaction of its own."""
    from outbox.operator import undecided  # noqa: PLC0415

    outcome = Outcome()
    for half_id in half_ids:
        try:
            with _acting(connection):
                undecided.reset(connection, settings, half_id, actor=act.actor, reason=act.reason)
        except OutboxError as error:
            outcome.failed[half_id] = as_failure(error) or Failure(str(error))
        else:
            outcome.done.append(half_id)
    return outcome


def reset_parked(connection: Connection, settings: Settings, topic: str | None, act: Act) -> Outcome:
    """Reset all parked halves of a topic, or of all, a batch at a time."""
    from outbox.operator import undecided  # noqa: PLC0415

    outcome = Outcome()
    while True:
        after = outcome.done[-1] if outcome.done else None
        with _acting(connection):
            batch = undecided.reset_parked(connection, settings, topic, actor=act.actor, reason=act.reason, after=after)
        if not batch:
            return outcome
        outcome.done += batch


def resolve(
    connection: Connection, settings: Settings, half_id: UUID, resolution: Resolution, act: Act, *, force: bool
) -> Decision:
    """Decide a half."""
    from outbox.operator import undecided  # noqa: PLC0415

    with _acting(connection):
        return undecided.resolve(
            connection, settings, half_id, resolution, actor=act.actor, reason=act.reason, force=force
        )


def print_answer(half_id: UUID, answer: Answer | None, output: Output) -> None:
    """Tell what came of a check; None: a worker will ask."""
    if answer is None:
        say(f"half message {half_id} will be checked by the next pass of a worker")
    elif answer.resolution is Resolution.UNKNOWN:
        say(f"no verdict on half message {half_id}: {answer.error}")
    else:
        say(f"{_done(half_id, answer.resolution, answer.decided_by or 'check')}; it took {answer.seconds:.3f} s")
    if output is Output.JSON:
        asked = {"asked": "next_pass" if answer is None else "now"}
        print_json({"id": half_id, **asked, **({} if answer is None else _renamed(answer))})


def print_outcome(outcome: Outcome, output: Output) -> None:
    """Tell what became of several halves.

    Raises:
        Failure: not all was done.
    """
    if output is Output.JSON:
        failed = [{"id": half_id, "error": str(failure)} for half_id, failure in outcome.failed.items()]
        print_json({"reset": outcome.done, "failed": failed})
    say(f"{counted(len(outcome.done))} will be checked again from the start")
    if not outcome.failed:
        return
    *others, last = outcome.failed.values()
    for failure in others:
        say(f"error: {failure}")
    codes = {failure.code for failure in outcome.failed.values()}
    raise Failure(str(last), codes.pop() if len(codes) == 1 and not outcome.done else Code.PARTIAL)


def counted(count: int, *, at_least: bool = False) -> str:
    """Return how many half messages, in words."""
    return f"{count}{'+' if at_least else ''} half message{'' if count == 1 else 's'}"


def print_decision(decision: Decision, output: Output) -> None:
    """Tell how a half was decided, now or before."""
    before = "" if decision.first else ", before this"
    say(_done(decision.half_id, decision.resolution, decision.decided_by) + before)
    if output is Output.JSON:
        fields = dataclasses.asdict(decision)
        print_json({"id": fields.pop("half_id"), **fields})


@contextmanager
def _acting(connection: Connection) -> Iterator[None]:
    """Run an act in a transaction which doesn't wait for ever for one that is deciding the same half."""
    from outbox.database.execute import execute  # noqa: PLC0415
    from outbox.database.sql import wait_at_most  # noqa: PLC0415
    from outbox.operator.undecided import PATIENCE  # noqa: PLC0415

    with connection.begin():
        execute(connection, wait_at_most(PATIENCE))
        yield


def _done(half_id: UUID, resolution: Resolution, by: str) -> str:
    done = "committed" if resolution is Resolution.COMMIT else "rolled back"
    return f"half message {half_id} was {done} by the {by}"


def _renamed(answer: Answer) -> dict[str, object]:
    fields = dataclasses.asdict(answer)
    return {"answer": fields.pop("resolution"), **fields}
