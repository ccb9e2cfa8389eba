"""A group that is paused, slowed down, or stopped by its breaker: what workers do, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Breaker, Message, Retry, Skip
from outbox.consumer.consumer import Consumer
from outbox.consumer.control.gate import READ_EVERY, Gate
from outbox.errors import ActRefused, InvalidHandler, InvalidMessage, InvalidRequest, NotFound
from outbox.message.limits import rate_of, rate_text
from outbox.telemetry.events import BreakerClosed, BreakerOpened, BreakerTried
from outbox.telemetry.hooks import TelemetryEvent, add_hook
from tests.kit import at_once, consume_all
from tests.kit.bench import Bench, Ward, but, record

BREAKER = Breaker(failures=3, window=60, trial_after=30)


class Clock:
    """A clock that stands still until it is moved: that of a worker, beside the database's own."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def look(self) -> None:
        """Let so much time go by that a worker looks again."""
        self.now += READ_EVERY


@pytest.fixture
def clock() -> Clock:
    """The clock of all workers of a test."""
    return Clock()


@pytest.fixture
def events() -> Iterator[list[TelemetryEvent]]:
    """What is told of breakers."""
    found: list[TelemetryEvent] = []
    kinds = BreakerOpened, BreakerTried, BreakerClosed
    remove = add_hook(lambda event: found.append(event) if isinstance(event, kinds) else None)
    yield found
    remove()


def gated(bench: Bench, clock: Clock, handler: Callable[..., Any] = record, **options: Any) -> Consumer:
    """Declare a consumer whose gate goes by a clock of a test."""
    consumer = bench.declare(handler, **options)
    consumer.gate = Gate(consumer.subscription, bench.settings, consumer._queues.keys(), clock)
    return consumer


@pytest.fixture
def declare(bench: Bench, clock: Clock) -> Callable[..., Consumer]:
    """A function that declares a consumer, whose gate goes by the clock of the test."""

    return partial(gated, bench, clock)


def control(bench: Bench) -> Any:
    """Return what holds the group back."""
    return bench.app.operator.control_of("g", "t")


def trial_due(bench: Bench, clock: Clock) -> None:
    """Let the time before the next trial be over, and workers look."""
    bench.run(
        "UPDATE outbox.group_control SET trial_at = clock_timestamp() - interval '1 ms' WHERE opened_at IS NOT NULL"
    )
    clock.look()


# --- pause -----------------------------------------------------------------------------------------------------------


def test_a_paused_group_handles_nothing(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """Neither new messages nor retries; another group goes on. Resumed, it does all of it in order."""
    ward = Ward(1)
    consumer, other = declare(ward), declare(group="other")
    bench.send(1)
    bench.consume(consumer)
    assert "paused" in bench.app.operator.pause_group("g", by="ann", why="the provider moves")
    ward.ill.clear()
    bench.send(2, 3)
    clock.look()
    assert not bench.consume(consumer)
    assert not bench.retry(consumer)
    assert bench.consume(other).done == 3
    assert [control(bench).state, control(bench).paused_by] == ["paused", "ann"]
    bench.run("DELETE FROM ledger")

    bench.app.operator.resume_group("g", by="ben")
    clock.look()
    assert bench.consume(consumer).done == 2
    assert bench.retry(consumer).done == 1
    assert bench.ledger() == ["2", "3", "1"]
    assert control(bench).state == "running"
    audited = "SELECT actor, action, target, reason FROM outbox.audit ORDER BY id"
    assert bench.rows(audited) == [
        ("ann", "pause_group", "g/t", "the provider moves"),
        ("ben", "resume_group", "g/t", ""),
    ]


def test_a_pause_ends_a_pass_after_the_running_transaction(
    bench: Bench, declare: Callable[..., Consumer], clock: Clock
) -> None:
    """What runs goes on to its end, and nothing more begins, though the pass had hundreds before it."""

    def pause(message: Message, session: Session) -> None:
        bench.app.operator.pause_group("g", by="me", why="enough")
        clock.look()

    consumer = declare(but(3, pause))
    bench.send(*range(1, 200))
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "3"]


def test_a_worker_that_starts_later_is_paused_too(bench: Bench, declare: Callable[..., Consumer]) -> None:
    """The pause is a row, not a memory."""
    bench.send(1)
    declare()
    bench.app.operator.pause_group("g", by="me", why="enough")
    assert not bench.consume(declare())
    assert bench.ledger() == []


def test_acts_that_change_nothing_are_refused(bench: Bench, declare: Callable[..., Consumer]) -> None:
    """They say why; a group that nobody knows is not found; a pause has a reason."""
    operator = bench.app.operator
    bench.send(1)
    declare()
    with pytest.raises(ActRefused, match="isn't paused"):
        operator.resume_group("g", by="me")
    operator.pause_group("g", by="me", why="enough")
    with pytest.raises(ActRefused, match="paused already"):
        operator.pause_group("g", by="me", why="enough")
    with pytest.raises(NotFound, match="'nobody'"):
        operator.pause_group("nobody", by="me", why="enough")
    with pytest.raises(NotFound, match="'elsewhere'"):
        operator.pause_group("g", topic="elsewhere", by="me", why="enough")
    with pytest.raises(InvalidRequest, match="reason"):
        operator.pause_group("g", by="me", why=" ")
    with pytest.raises(InvalidRequest, match="'fast'"):
        operator.set_rate("g", "fast", by="me")
    with pytest.raises(ActRefused, match="as its handler declares already"):
        operator.set_rate("g", None, by="me")


def test_of_two_operators_one_pauses(bench: Bench, declare: Callable[..., Consumer]) -> None:
    """Both at once: one row, one row in the audit, and one is refused."""
    bench.send(1)
    declare()

    def pause(who: str) -> str:
        try:
            return bench.app.operator.pause_group("g", by=who, why="enough")
        except ActRefused as refused:
            return str(refused)

    answers = sorted(at_once(lambda: pause("ann"), lambda: pause("ben")), key=len)
    assert "is paused: workers" in answers[0]
    assert "paused already" in answers[1]
    assert bench.rows("SELECT count(*) FROM outbox.audit") == [1]


# --- rate ------------------------------------------------------------------------------------------------------------


def age_grants(bench: Bench, hours: int) -> None:
    """Let so many hours go by for the grants that were made."""
    bench.run("UPDATE outbox.rate_grant SET ends_at = ends_at - make_interval(hours => :hours)", hours=hours)


def test_a_rate_is_kept_over_all_threads(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """Two threads share what a group may: one message an hour is one message, whoever handles it."""
    one, two = declare(rate="1/h"), declare(rate="1/h")
    bench.send(*range(6))
    for hour in range(1, 4):
        bench.consume(one)
        bench.consume(two)
        bench.consume(one)
        assert len(bench.ledger()) == hour
        clock.now += 3600
        age_grants(bench, 1)
    assert bench.ledger() == ["0", "1", "2"]


def test_a_rate_holds_for_retries(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """A retry is one of the messages of that second; a pass that finds none to retry takes nothing."""
    dependency = Ward(down=True)
    consumer = declare(dependency, rate="1/h")
    assert not bench.retry(consumer)
    assert bench.rows("SELECT count(*) FROM outbox.rate_grant") == [0]
    bench.send(1)
    bench.consume(consumer)
    dependency.down = False
    assert not bench.retry(consumer)
    clock.now += 3600
    age_grants(bench, 1)
    assert bench.retry(consumer).done == 1


def test_a_rate_cuts_batches(bench: Bench, declare: Callable[..., Consumer]) -> None:
    """A grant is for as many messages as were needed before, and a batch is no larger."""
    sizes = []

    def handle(messages: list[Message], session: Session) -> None:
        sizes.append(len(messages))

    consumer = declare(handle, rate="1000000/s", batch=100, takes_batch=True)
    bench.send(*range(200))
    bench.consume(consumer)
    assert sum(sizes) == 200
    assert sizes[:4] == [1, 2, 4, 8]


def test_an_operator_sets_another_rate(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """It goes over the declared one within a look, and a slow rate's grant doesn't hold up a fast one."""
    consumer = declare(rate="1/h")
    bench.send(*range(10))
    bench.consume(consumer)
    assert "10000/s" in bench.app.operator.set_rate("g", "10000/s", by="me", why="the provider allows it")
    assert not bench.consume(consumer)
    clock.look()
    bench.consume(consumer)
    assert len(bench.ledger()) == 10
    assert control(bench).rate_text == "10000/s"
    bench.app.operator.set_rate("g", None, by="me")
    assert control(bench).rate is None


def test_prune_deletes_old_grants(bench: Bench, declare: Callable[..., Consumer]) -> None:
    """A grant counts as long as it lasts."""
    from outbox.prune.prune_pass import prune_consumer_once

    consumer = declare(rate="10/s")
    bench.send(1)
    bench.consume(consumer)
    age_grants(bench, 1)
    prune_consumer_once(bench.connection, bench.source, bench.settings, "g", "t")
    assert bench.rows("SELECT count(*) FROM outbox.rate_grant") == [0]


@pytest.mark.parametrize(
    ("written", "rate", "shown"),
    [
        ("100/s", 100.0, "100/s"),
        ("30/min", 0.5, "30/min"),
        ("5/h", 5 / 3600, "5/h"),
        (2.5, 2.5, "2.5/s"),
        (" 1 / s", 1.0, "1/s"),
    ],
)
def test_rates(written: str | float, rate: float, shown: str) -> None:
    """A rate is read in three units, and written in the one in which it is at least one."""
    assert rate_of(written) == rate
    assert rate_text(rate) == shown


@pytest.mark.parametrize("written", ["fast", "0/s", 0, -1, "100", "1/day", True, float("nan"), 1e12])
def test_what_is_no_rate(written: Any) -> None:
    """It is refused, with how it is written."""
    with pytest.raises(InvalidHandler, match="100/s"):
        rate_of(written)


# --- breaker ---------------------------------------------------------------------------------------------------------


def test_a_breaker_opens(
    bench: Bench, declare: Callable[..., Consumer], clock: Clock, events: list[TelemetryEvent]
) -> None:
    """Once so many attempts have failed, nothing more is tried, by no worker, whatever waits or is due."""
    dependency = Ward()
    consumer, other = declare(dependency, breaker=BREAKER), declare(dependency, breaker=BREAKER)
    bench.send(*range(20))
    dependency.down = True
    bench.consume(consumer)
    clock.look()
    bench.consume(other)
    bench.retry(consumer)
    assert len(dependency.calls) == 3
    assert bench.statuses() == [("failed", 1)] * 3
    assert events == [BreakerOpened(group="g", topic="t", failures=3, reason="ConnectionError: the provider is down")]
    found = control(bench)
    assert (found.state, found.openings) == ("open", 1)
    assert found.opened_because == "ConnectionError: the provider is down"


def test_a_success_between_keeps_it_closed(bench: Bench, declare: Callable[..., Consumer]) -> None:
    """It opens where everything fails, not where some messages do; also where another thread has the successes."""

    def handle(message: Message, session: Session) -> Retry | None:
        if message.body % 3:
            return Retry(reason="not this one")
        record(message, session)
        return None

    consumer = declare(handle, breaker=BREAKER)
    bench.send(*range(30))
    bench.consume(consumer)
    assert len(bench.ledger()) == 10
    assert control(bench).state == "running"


def test_a_success_of_another_thread_keeps_it_closed(bench: Bench, declare: Callable[..., Consumer]) -> None:
    """One whose network is broken doesn't stop the others: what they have handled is there to be seen."""
    broken = Ward(down=True)
    one, other = declare(broken, breaker=BREAKER), declare(breaker=BREAKER)
    for _ in range(4):
        bench.send(1, 2)
        bench.consume(one)
        bench.send(3)
        bench.consume(other)
    assert len(broken.calls) == 8
    assert control(bench).state == "running"


def test_failures_before_the_window_do_not_count(bench: Bench, declare: Callable[..., Consumer]) -> None:
    """Nor does what a handler skips."""
    dependency = Ward(down=True)
    consumer = declare(dependency, breaker=BREAKER)
    bench.send(1, 2)
    bench.consume(consumer)
    bench.run("UPDATE outbox.attempt_history SET failed_at = failed_at - interval '61 s'")
    bench.send(3, 4)
    bench.consume(consumer)
    assert control(bench).state == "running"
    bench.send(5)
    bench.consume(consumer)
    assert control(bench).state == "open"
    skipping = declare(lambda message, session: Skip("no"), group="skips", breaker=BREAKER)
    bench.consume(skipping)
    assert bench.app.operator.control_of("skips", "t").state == "running"


def test_one_trial_at_a_time_decides(
    bench: Bench, declare: Callable[..., Consumer], clock: Clock, events: list[TelemetryEvent]
) -> None:
    """When it is due, one message is tried by one of two workers. It fails: the next one, later; it succeeds: go on."""
    dependency = Ward()
    consumers = [declare(dependency, breaker=BREAKER) for _ in range(2)]
    bench.send(*range(20))
    dependency.down = True
    bench.consume(consumers[0])
    trial_due(bench, clock)
    assert control(bench).state == "half_open"
    for consumer in consumers:
        clock.look()
        bench.consume(consumer)
    assert len(dependency.calls) == 4
    assert control(bench).state == "open"

    dependency.down = False
    clock.look()
    assert not bench.consume(consumers[1])
    trial_due(bench, clock)
    bench.consume(consumers[1])
    assert len(dependency.calls) == 4 + 16
    assert control(bench).state == "running"
    kinds = [type(event) for event in events]
    assert kinds == [BreakerOpened, BreakerTried, BreakerTried, BreakerClosed]
    # Those that failed while it was open have used up one attempt each, and what failed before it closed is forgotten.
    assert [attempts for status, attempts in bench.statuses() if status == "failed"] == [1] * 4
    dependency.down = True
    bench.send(*range(2))
    bench.consume(consumers[1])
    assert control(bench).state == "running"


def test_a_retry_can_be_the_trial(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """Where nothing waits but what has failed; and a pass without anything to retry leaves the trial to others."""
    dependency = Ward(down=True)
    consumer = declare(dependency, breaker=BREAKER)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    trial_due(bench, clock)
    assert not bench.retry(consumer, due=False)
    assert not bench.consume(consumer)
    assert control(bench).state == "half_open"
    dependency.down = False
    assert bench.retry(consumer).done == 3
    assert control(bench).state == "running"


def test_a_retry_that_fails_as_the_trial(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """One attempt of one message, and nothing more until the next trial."""
    dependency = Ward(down=True)
    consumer = declare(dependency, breaker=BREAKER)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    trial_due(bench, clock)
    assert bench.retry(consumer).failed == 1
    clock.look()
    assert not bench.retry(consumer)
    assert sorted(bench.statuses()) == [("failed", 1), ("failed", 1), ("failed", 2)]


def test_resume_tries_at_once(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """An operator who has mended the dependency needn't wait for the next trial."""
    dependency = Ward(down=True)
    consumer = declare(dependency, breaker=BREAKER)
    bench.send(*range(5))
    bench.consume(consumer)
    dependency.down = False
    bench.app.operator.resume_group("g", by="me", why="mended")
    clock.look()
    assert bench.consume(consumer).done == 2


def test_a_trial_that_takes_long_has_no_rival(
    bench: Bench, declare: Callable[..., Consumer], clock: Clock, engine: Engine
) -> None:
    """While its transaction runs, longer than the time between two trials, no second one begins."""
    dependency = Ward()
    rival = declare(dependency, breaker=BREAKER)
    seen: list[int] = []

    def handle(message: Message, session: Session) -> None:
        if dependency.down:
            dependency(message, session)
        trial_due(bench, clock)
        clock.now += 60
        with bench.another() as there:
            seen.append(consume_all(rival, *there).done)
        record(message, session)

    consumer = declare(handle, breaker=BREAKER)
    bench.send(*range(12), key=None)
    dependency.down = True
    bench.consume(consumer)
    dependency.down = False
    trial_due(bench, clock)
    consumer.consume_once(bench.connection, bench.source)
    assert seen[0] == 0


def test_a_trial_that_dies_closes_nothing(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """Its connection is cut in the handler: the breaker stays open, and another worker tries when it is time."""
    dependency = Ward()
    cut = "SELECT pg_terminate_backend(pg_backend_pid())"

    def handle(message: Message, session: Session) -> None:
        if dependency.down:
            dependency(message, session)
        session.execute(text(cut))

    consumer, other = declare(handle, breaker=BREAKER), declare(breaker=BREAKER)
    bench.send(*range(6))
    dependency.down = True
    bench.consume(consumer)
    trial_due(bench, clock)
    dependency.down = False
    with bench.another() as there, pytest.raises(DBAPIError):
        consume_all(consumer, *there)
    assert control(bench).state == "open"
    assert bench.ledger() == []
    assert not bench.consume(other)
    trial_due(bench, clock)
    bench.consume(other)
    assert bench.ledger() == ["3", "4", "5"]
    assert control(bench).state == "running"


def test_a_commit_that_fails_closes_nothing(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """The success and the end of the breaker are one transaction."""
    bench.run("CREATE TABLE late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    bench.run("INSERT INTO late VALUES (1)")
    dependency = Ward()

    def handle(message: Message, session: Session) -> None:
        if dependency.down:
            dependency(message, session)
        session.execute(text("INSERT INTO late VALUES (1)"))

    consumer = declare(handle, breaker=BREAKER)
    bench.send(*range(6))
    dependency.down = True
    bench.consume(consumer)
    dependency.down = False
    trial_due(bench, clock)
    bench.consume(consumer)
    assert control(bench).state == "open"
    assert [attempts for _, attempts in bench.statuses()] == [1] * 4


def test_of_many_threads_one_opens_it(
    bench: Bench, declare: Callable[..., Consumer], engine: Engine, events: list[TelemetryEvent]
) -> None:
    """Four threads fail at once: it opens once, and is told once; no thread burns more than it had in hand."""
    dependency = Ward(down=True)
    consumers = [declare(dependency, breaker=BREAKER) for _ in range(4)]
    bench.send(*range(200), key=None)

    def work(consumer: Consumer) -> None:
        with bench.another() as there:
            consume_all(consumer, *there)

    at_once(*(partial(work, consumer) for consumer in consumers))
    assert [type(event) for event in events] == [BreakerOpened]
    assert control(bench).openings == 1
    # Failures that commit at the same time don't see each other; then each has one more in hand at most.
    assert len(dependency.calls) <= 3 + 2 * 4


def test_a_trial_that_is_skipped_closes_it(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """The handler has answered: what it needs is there."""
    dependency = Ward(down=True)

    def handle(message: Message, session: Session) -> Skip:
        if dependency.down:
            dependency(message, session)
        return Skip("not for us")

    consumer = declare(handle, breaker=BREAKER)
    bench.send(*range(5))
    bench.consume(consumer)
    dependency.down = False
    trial_due(bench, clock)
    assert bench.consume(consumer).done == 2
    assert control(bench).state == "running"


def test_an_ordered_group_is_tried_by_its_head(bench: Bench, declare: Callable[..., Consumer], clock: Clock) -> None:
    """Its order stays: the message at which it stopped is the one that is tried."""
    dependency = Ward(down=True)
    consumer = declare(dependency, breaker=Breaker(1, 60, 30), ordered=True)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    dependency.down = False
    bench.age_retries()
    assert not bench.consume(consumer)
    trial_due(bench, clock)
    assert bench.consume(consumer).done == 3
    assert bench.ledger() == ["1", "2", "3"]
    assert control(bench).state == "running"


def test_a_breaker_that_is_not_declared_any_more_is_tried(bench: Bench) -> None:
    """Where a release left it open, the next one without it isn't held for ever: the first trial closes it."""
    clock, dependency = Clock(), Ward(down=True)
    bench.send(*range(5))
    bench.consume(gated(bench, clock, dependency, breaker=BREAKER))
    dependency.down = False
    undeclared = gated(bench, clock, dependency)
    assert not bench.consume(undeclared)
    trial_due(bench, clock)
    assert bench.consume(undeclared).done == 2
    assert control(bench).state == "running"


@pytest.mark.parametrize("options", [{"failures": 0}, {"failures": True}, {"window": 0}, {"trial_after": -1}])
def test_a_breaker_that_cannot_work(options: dict[str, Any]) -> None:
    """It is refused where it is declared."""
    with pytest.raises((InvalidHandler, InvalidMessage), match=next(iter(options))):
        Breaker(**options)
