"""What may meet: each flow of the framework, in which stages it has something to do, and with what it may end.

Two flows meet at every stage that both know, on the same message; where they know none in common, each at its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import INJECTED, Outbox
from outbox.check.asker import Asker
from outbox.check.check_pass import check_once
from outbox.compensate.compensate_pass import compensate_once
from outbox.database.engines import EngineRunner
from outbox.database.execute import SERIALIZATION_FAILURE, execute, sqlstate
from outbox.database.sql import wait_at_most
from outbox.dispatch.dispatch_pass import dispatch_once, dispatch_passed, release_due_once
from outbox.errors import ActRefused, AlreadyCommitted, AlreadyRolledBack, NotFound
from outbox.message.model import uuid7
from outbox.prune.prune_pass import prune_consumer_once, prune_producer_once
from outbox.prune.rewrite import CHECKS, rewrite
from outbox.prune.segments import id_at, make_segment, segment_of
from tests.interleave.explore import Act
from tests.interleave.world import GROUP, KEY, SAGA, TOPIC, World, confirm_on, drained, take_money

WHO: dict[str, Any] = {"by": "ada", "why": "weave"}


@dataclass(frozen=True, slots=True)
class FlowKind:
    """A flow: what it does in a world, and the stages in which that is something.

    ``expects`` are the errors with which it may end though nobody hurts it: definite answers to the loser of a race.
    ``again``: after a lost connection it is tried once more, as workers and sensible callers do. ``orders`` is what was
    done before about the subject, so that there is something to do.
    """

    name: str
    run: Callable[[World, Engine], Any]
    stages: tuple[str, ...] = ("nothing",)
    expects: tuple[type[Exception], ...] = ()
    again: bool = True
    orders: Callable[[World], None] | None = None
    #: Has something to do in each stage; whether it is to meet the others in all of theirs.
    everywhere: Literal["", "first", "all"] = ""

    def act(self, world: World) -> Act:
        """Return the flow in a world."""

        def run(engine: Engine) -> Any:
            try:
                return self.run(world, engine)
            except DBAPIError as error:
                if not (self.again and error.connection_invalidated):
                    raise
            return self.run(world, engine)

        return Act(self.name, run)


def _subject(world: World, *stages: str) -> UUID:
    """Return the message at which the flows meet: of the first of these stages that was seeded."""
    return next(world.subjects[stage] for stage in stages if stage in world.subjects)


def _worker(engine: Engine) -> Connection:
    """Return a connection as a worker has it."""
    return engine.connect().execution_options(isolation_level="AUTOCOMMIT")


def _pass(one: Callable[[World, Outbox, Connection], Any]) -> Callable[[World, Engine], Any]:
    """Return a flow that makes a worker's pass."""

    def run(world: World, engine: Engine) -> Any:
        with _worker(engine) as connection:
            return one(world, world.app_on(engine), connection)

    return run


# --- the producer ----------------------------------------------------------------------------------------


def send(world: World, engine: Engine) -> UUID:
    """Take money and tell of it, in one transaction."""
    app = world.app_on(engine)
    with Session(engine) as session, session.begin():
        message_id = uuid7()
        take_money(session, message_id, "send")
        app.send(session, TOPIC, {}, key=KEY, id=message_id)
    return message_id


def prepare(world: World, engine: Engine) -> UUID:
    """Take money and prepare to tell of it."""
    app = world.app_on(engine)
    with engine.begin() as connection:
        message_id = uuid7()
        take_money(connection, message_id, "prepare")
        app.prepare(connection, TOPIC, {}, key=KEY, immunity=0, id=message_id)
    return message_id


def commit(world: World, engine: Engine) -> Any:
    """Commit a prepared half, alone."""
    return world.app_on(engine).commit(_subject(world, "undecided"))


def rollback(world: World, engine: Engine) -> Any:
    """Roll a prepared half back, alone."""
    return world.app_on(engine).rollback(_subject(world, "undecided"))


def commit_within(world: World, engine: Engine) -> None:
    """Commit a prepared half with a business change, which must not be made twice."""
    app, half_id = world.app_on(engine), _subject(world, "undecided")
    with Session(engine) as session, session.begin():
        take_money(session, half_id, "within")
        app.commit(half_id, within=session)


def commit_repeatable(world: World, engine: Engine) -> None:
    """Do so in a transaction whose snapshot is older than what others do meanwhile; again where it can't be kept."""
    app, half_id = world.app_on(engine), _subject(world, "undecided")
    while True:
        try:
            with Session(engine.execution_options(isolation_level="REPEATABLE READ")) as session, session.begin():
                session.execute(text("SELECT pg_current_snapshot()"))
                take_money(session, half_id, "within")
                app.commit(half_id, within=session)
        except DBAPIError as error:
            if sqlstate(error) != SERIALIZATION_FAILURE:
                raise
        else:
            return


def two_phase(world: World, engine: Engine) -> str:
    """Run a fenced function; once it runs, no check may decide it."""
    app, runs = world.app_on(engine), []

    @app.two_phase(topic=TOPIC, key=lambda body: KEY, immunity=0)
    def pay(number: int, session: Session = INJECTED) -> str:
        runs.append(number)
        take_money(session, None, "fenced")
        return "paid"

    try:
        return pay(1)
    except AlreadyRolledBack as error:
        if runs:
            raise AssertionError("it was rolled back while it held its fence") from error
        raise


# --- operators -------------------------------------------------------------------------------------------


def _operator(act: Literal["resend", "recall", "rollback", "retry", "park"], *stages: str) -> Callable[..., Any]:
    def run(world: World, engine: Engine) -> Any:
        options: dict[str, str] = {"group": GROUP} if act in {"retry", "park"} else {}
        return getattr(world.app_on(engine).operator, act)(_subject(world, *stages), **WHO, **options)

    return run


_COMPENSATED = ("dispatched", "committed", "failed", "failing", "parked", "due")


def _order_compensation(world: World) -> None:
    """Order the compensation of the message at which the flows meet."""
    world.app.operator.compensate(_subject(world, *_COMPENSATED), **WHO)


# --- workers ---------------------------------------------------------------------------------------------


def _confirm_at_rest(world: World) -> None:
    """Have the producer learn at rest what became of its messages."""
    world.nightly.append(World.confirm)


def _confirmed_before(world: World) -> None:
    """Have the producer know what became of its messages so far."""
    world.confirm()
    _confirm_at_rest(world)


def set_back(world: World, engine: Engine) -> None:
    """Set the group's offset back to its beginning, by hand, while all that it has read is there.

    It stays registered: a group that isn't known any more is deleted, and no worker may consume for it then.
    """
    with engine.begin() as connection:
        connection.execute(
            text("DELETE FROM outbox.consumer_offset WHERE consumer_group = :group AND position > 0"), {"group": GROUP}
        )


def fall_back(world: World, engine: Engine) -> None:
    """Have the saga's owner know nothing of it any more, as a database that was restored; its participant does."""
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox.consumer_offset WHERE consumer_group = :group"), {"group": SAGA})
        connection.execute(text("DELETE FROM outbox.consumer_message WHERE consumer_group = :group"), {"group": SAGA})
        connection.execute(text("DELETE FROM outbox.saga_command"))
        connection.execute(text("DELETE FROM outbox.saga"))


def _advance(world: World, app: Outbox, connection: Connection) -> None:
    for consumer in world.consumers_of_saga(app):
        drained(partial(consumer.consume_once, connection, connection))


def _rewrite(world: World, app: Outbox, connection: Connection) -> Any:
    return rewrite(connection, world.settings.schema, replace(CHECKS, size=-1))


def _make_segment(world: World, app: Outbox, connection: Connection) -> bool:
    """Make a segment, into which the half moves at which the flows meet."""
    ms = _subject(world, "undecided").int >> 80
    return make_segment(connection, world.settings, segment_of(id_at(ms - 60_000), id_at(ms + 60_000)))


def _check(world: World, app: Outbox, connection: Connection) -> Any:
    asker = Asker(lambda _: EngineRunner(connection.engine), 1)
    try:
        return check_once(connection, world.settings, app.checkers, asker)
    finally:
        asker.end()


def _consume(world: World, app: Outbox, connection: Connection) -> Any:
    consumer = world.consumer(app)
    return drained(lambda: consumer.consume_once(connection, connection))


def _consume_woken(world: World, app: Outbox, connection: Connection) -> Any:
    """As a worker that has looked at the queues a moment ago, and is told of news in each."""
    consumer = world.consumer(app)
    consumer.waiting_queues(connection, connection)
    consumer._all_due_at = math.inf
    for queue in consumer._queues:
        consumer.wake(queue)
    return drained(lambda: consumer.consume_once(connection, connection))


def _compensate(world: World, app: Outbox, connection: Connection) -> Any:
    return compensate_once(
        connection,
        world.settings,
        compensations=app.compensations,
        new_runner=lambda _: EngineRunner(connection.engine),
    )


def _prune(world: World, app: Outbox, connection: Connection) -> Any:
    done = prune_producer_once(connection, world.settings)
    return done + prune_consumer_once(connection, connection, world.settings, GROUP, TOPIC)


# --- repairs of a reconciliation -------------------------------------------------------------------------


def place_passed(world: World, engine: Engine) -> Any:
    """Place what dispatch has passed."""
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection, connection.begin():
        execute(connection, wait_at_most(3))
        subject = _subject(world, "passed", "committed")
        return dispatch_passed(connection, world.settings, [subject], actor="night", reason="repair")


def resend_missing(world: World, engine: Engine) -> Any:
    """Send again what the consumer lacks."""
    from outbox.reconcile.job import Access, Job, Outcome, Pair
    from outbox.reconcile.repair import Work, resend_missing
    from outbox.reconcile.rows import Finding
    from outbox.reconcile.tables import ProducerState

    access, pair = Access(world.url, world.settings), Pair(TOPIC, GROUP)
    job = Job(access, access, (pair,), actor="night", apply=True)
    subject = _subject(world, "missing", "dispatched")
    none: dict[str, Any] = dict.fromkeys(Finding.__dataclass_fields__)
    finding = Finding(
        **none | {"id": subject, "outcome": Outcome.MISSING, "state": ProducerState.COMMITTED, "sends": 1}
    )
    return resend_missing(Work(job, pair, uuid7(), engine, engine), [finding])


_DECIDED = (AlreadyCommitted, AlreadyRolledBack)

FLOWS: dict[str, FlowKind] = {
    flow.name: flow
    for flow in (
        FlowKind("send", send, again=False, everywhere="all"),
        FlowKind("prepare", prepare, again=False, everywhere="first"),
        FlowKind("commit", commit, ("undecided",), (AlreadyRolledBack,)),
        FlowKind("rollback", rollback, ("undecided",), (AlreadyCommitted,)),
        FlowKind("commit_within", commit_within, ("undecided",), _DECIDED, again=False),
        FlowKind("commit_repeatable", commit_repeatable, ("undecided",), _DECIDED, again=False),
        FlowKind("two_phase", two_phase, ("nothing",), (AlreadyRolledBack,), again=False),
        FlowKind("refuse", _operator("rollback", "undecided", "orphan"), ("undecided", "orphan"), (ActRefused,)),
        FlowKind("check", _pass(_check), ("undecided", "orphan", "nothing")),
        FlowKind(
            "dispatch",
            _pass(lambda world, app, connection: drained(lambda: dispatch_once(connection, world.settings))),
            ("committed", "delayed", "restored", "promoted", "passed"),
        ),
        FlowKind(
            "release",
            _pass(lambda world, app, connection: release_due_once(connection, world.settings)),
            ("due", "delayed"),
        ),
        FlowKind("recall", _operator("recall", "due", "delayed"), ("due", "delayed"), (ActRefused,)),
        FlowKind(
            "resend",
            _operator("resend", "dispatched", "failed", "parked", "settled", "in_order", "failing", "missing"),
            ("dispatched", "failed", "parked", "settled", "missing", "failing", "in_order"),
            (ActRefused, NotFound),
        ),
        FlowKind("consume", _pass(_consume), ("dispatched", "failing", "in_order", "failed", "resent", "missing")),
        FlowKind("consume_woken", _pass(_consume_woken), ("dispatched", "failing", "in_order", "resent")),
        FlowKind(
            "retry",
            _pass(lambda world, app, connection: world.consumer(app).retry_once(connection, connection)),
            ("failed", "parked", "resent"),
        ),
        FlowKind("give_back", _operator("retry", "failed", "parked"), ("failed", "parked"), (ActRefused,)),
        FlowKind("park", _operator("park", "failed"), ("failed",), (ActRefused,)),
        FlowKind("compensate", _pass(_compensate), _COMPENSATED, orders=_order_compensation),
        FlowKind(
            "confirm",
            _pass(confirm_on),
            ("settled", "parked", "failed", "missing", "dispatched", "failing", "due"),
            orders=_confirm_at_rest,
        ),
        FlowKind("confirm_again", _pass(confirm_on), ("parked", "failed", "missing"), orders=_confirmed_before),
        FlowKind("set_back", set_back, ("failed", "missing", "dispatched")),
        FlowKind("prune", _pass(_prune), ("settled", "newest", "dispatched", "failed")),
        FlowKind("rewrite", _pass(_rewrite), ("undecided",)),
        FlowKind("make_segment", _pass(_make_segment), ("undecided",)),
        FlowKind("advance", _pass(_advance), ("begun", "booked")),
        FlowKind("fall_back", fall_back, ("begun", "booked")),
        FlowKind("place", place_passed, ("passed", "committed")),
        FlowKind("repair", resend_missing, ("missing", "dispatched")),
    )
}


@dataclass(frozen=True, slots=True)
class Meeting:
    """Flows, and the stages in which they meet."""

    flows: tuple[FlowKind, ...]
    stages: tuple[str, ...]

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{' + '.join(flow.name for flow in self.flows)} @ {', '.join(self.stages)}"

    @property
    def orders(self) -> list[Callable[[World], None]]:
        """What was done before they meet; once, however many of them need it."""
        return list(dict.fromkeys(flow.orders for flow in self.flows if flow.orders is not None))


def meetings_of(*names: str) -> list[Meeting]:
    """Return the meetings of some flows; the last name may say at which stage, as in ``check@orphan``."""
    *others, (last, _, stage) = *names[:-1], names[-1].partition("@")
    meetings = _meetings_of(*others, last)
    return [each for each in meetings if stage in {"", *each.stages}]


def _meetings_of(*names: str) -> list[Meeting]:
    flows = tuple(FLOWS[name] for name in names)
    of_own = [flow.stages for flow in flows if not flow.everywhere]
    if not of_own:
        return [Meeting(flows, ("nothing",))]
    common = [stage for stage in of_own[0] if all(stage in stages for stages in of_own)]
    if any(flow.everywhere == "first" for flow in flows):
        common = common[:1]
    if common:
        return [Meeting(flows, (stage,)) for stage in common]
    return [Meeting(flows, tuple(dict.fromkeys(stages[0] for stages in of_own)))]


#: Threes in which a third flow changes what two of them meet at.
THREES = (
    ("commit", "check", "dispatch"),
    ("send", "dispatch", "consume"),
    ("resend", "consume", "retry"),
    ("park", "retry", "give_back"),
    ("recall", "dispatch", "release"),
    ("two_phase", "check", "dispatch"),
)


def all_meetings(pairs: Sequence[Sequence[str]] = ()) -> list[Meeting]:
    """Return the meetings of these pairs, or of all pairs (each flow also with itself) and the chosen threes."""
    chosen = pairs or [*itertools.combinations_with_replacement(FLOWS, 2), *THREES]
    return [meeting for names in chosen for meeting in meetings_of(*names)]
