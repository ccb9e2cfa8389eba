"""Every kind of called function: what it raises or returns at its worst is one failure that says so, and no more."""

from __future__ import annotations

import datetime as dt
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import Middleware, Outbox, Park, Participant, Saga, Settings, testing
from outbox.errors import InvalidHandler, SchemaMissing
from outbox.message.answer import CALLBACK, CHECKER, COMPENSATION, FUNCTION, HANDLER
from tests.kit.hostile import HOSTILE, LEAVING, NO_ANSWERS, VALUES

#: What can be raised in a thread of the test's: Ctrl-C is the main thread's.
RAISED: Mapping[str, Callable[[], BaseException]] = {
    name: make for name, make in (HOSTILE | LEAVING).items() if name != "KeyboardInterrupt"
}
#: One for each way in which describing an exception was broken, and each that leaves.
SOME = ("a dict of exceptions", "a cause that raises", "a text that raises", "a class that raises", "SystemExit")


@pytest.fixture
def app(engine: Engine, settings: Settings) -> Outbox:
    """A producer and consumer in one database."""
    return Outbox(engine, settings=settings)


def send(app: Outbox, *bodies: Any, topic: str = "t") -> list[Any]:
    """Send each body in one transaction."""
    assert isinstance(app.engine, Engine)
    with app.engine.begin() as connection:
        return [app.send(connection, topic, body) for body in bodies]


def rows(app: Outbox, sql: str) -> list[Any]:
    """Return the rows of a query."""
    assert isinstance(app.engine, Engine)
    with app.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(sql))]


def failing_with(name: str) -> Callable[..., Any]:
    """Return a function that raises an exception, or returns what is no answer."""

    def function(*_: Any) -> Any:
        if name in RAISED:
            raise RAISED[name]()
        return (NO_ANSWERS | VALUES)[name][0]()

    return function


@pytest.mark.parametrize("name", [*SOME, "coroutine", "class Retry"])
def test_compensations_callbacks_and_dead_letters(
    app: Outbox, name: str, engine: Engine, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call has failed, is told, and is made again; those after it are made as well."""
    caplog.set_level(logging.WARNING, "outbox")
    reached: list[str] = []

    def fails(about: Any, session: Session) -> Any:
        reached.append(type(about).__name__)
        return failing_with(name)(about, session)

    app.consumer("t", group="g")(lambda message, session: Park("no"))
    app.known_group("t", group="g")
    app.compensation("t")(fails)
    app.on_parked("t")(fails)
    app.on_undeliverable("t")(fails)
    ids = send(app, 1, 2)
    testing.drain(app)
    testing.confirm(app)
    for _ in range(2):
        testing.drain(app)
        testing.make_due(app, failed=True)
    app.operator.compensate(ids, by="ada", why="a test")
    assert testing.bulk(app).failed == 2
    assert sorted(reached) == ["DeadLetter"] * 4 + ["Delivery"] * 4 + ["Message"] * 2
    told = Counter(getattr(record, "outbox_event", "") for record in caplog.records)
    assert (told["compensation.failed"], told["message.failed"]) == (2, 8), told


def test_a_two_phase_function(app: Outbox) -> None:
    """What it raises reaches its caller, and the half is rolled back by it where that was said."""
    raising = iter([*RAISED.values()])
    raised: list[BaseException] = []

    @app.two_phase(topic="t", rollback_on=(BaseException,))
    def pay(session: Session) -> None:
        raised.append(next(raising)())
        raise raised[-1]

    for _ in RAISED:
        with pytest.raises(BaseException) as caught:
            pay()
        # Python itself can't carry one that lets no traceback be written.
        assert caught.value is raised[-1] or isinstance(caught.value, AttributeError)
    decided = rows(app, "SELECT resolution, decided_by, count(*) FROM outbox.op_message GROUP BY 1, 2")
    assert decided == [("rollback", "producer", len(RAISED))]


def test_functions_that_never_ran(app: Outbox, engine: Engine) -> None:
    """The end of a saga, a participant's functions, and service functions refuse what only looks like a call."""
    saga: Saga[Any] = Saga(app, "trip")
    saga.step("hotel", "book-hotel")
    app.consumer("book-hotel", group="hotel")(lambda message, session: message.reply(session, {}) and None)

    @saga.ended
    async def tell(flow: Any, session: Session) -> None:
        raise AssertionError

    with Session(engine) as session, session.begin():
        saga.start(session, {})
    assert testing.drain(app).failed == 1
    (error,) = rows(app, "SELECT last_error FROM outbox.consumer_message WHERE status = 'failed'")[0]
    assert "function for the end of 'trip' is async, so call it with an AsyncSession" in error
    participant: Participant[str] = Participant(app, "seats")
    participant.on_try(lambda branch, session: "reserved")
    with Session(engine) as session, pytest.raises(InvalidHandler, match="the function returned a value of type str"):
        participant.attempt(session, uuid4(), "x")

    async def later() -> dict[str, int]:
        raise AssertionError

    @app.transactional(topic="t")
    def wrapped(session: Session) -> Any:
        return later()

    @app.two_phase(topic="t")
    def half_wrapped(session: Session) -> Any:
        return later()

    for call in (wrapped, half_wrapped):
        with pytest.raises(InvalidHandler, match="returned a coroutine"):
            call()
    assert rows(app, "SELECT count(*) FROM outbox.op_message o JOIN outbox.half_message h ON h.id = o.half_id "
                     "WHERE topic = 't'") == [(0,)]  # fmt: skip


def test_middlewares_and_hooks(app: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """What they raise or return by mistake is logged once in a row, and the message is handled."""

    class Mistaken(Middleware):
        async def on_send(self, *_: Any) -> Any:  # type: ignore[override]
            raise AssertionError

        async def around(self, *_: Any) -> Any:  # type: ignore[override]
            raise AssertionError

        async def on_event(self, *_: Any) -> None:  # type: ignore[override]
            raise AssertionError

    class Leaving(Middleware):
        def on_event(self, *_: Any) -> None:
            raise SystemExit(1)

        def around(self, *_: Any) -> Any:
            raise HOSTILE["a cause that raises"]()

    app.use(Mistaken())
    app.use(Leaving())
    app.consumer("t", group="g")(lambda message, session: None)
    send(app, 1)
    assert testing.drain(app).done == 1
    failed = [record for record in caplog.records if getattr(record, "outbox_event", "") == "hook.failed"]
    assert {record.levelname for record in failed} == {"ERROR"}
    assert all(logging.Formatter().format(record) for record in failed)
    assert any("returned a coroutine" in logging.Formatter().format(record) for record in failed)


@pytest.mark.parametrize("kind", [HANDLER, CHECKER, COMPENSATION, CALLBACK, FUNCTION], ids=lambda kind: kind.what)
@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_no_kind_may_return(kind: Any, name: str) -> None:
    """What never ran, or is a class or an exception, is no answer of any function; a coroutine is closed."""
    make, said = NO_ANSWERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f"the {kind.what} {said}" in str(kind.refusal(make()))


def test_what_a_compensation_may_return() -> None:
    """Values are kept with it; others may return None alone."""
    for make, _ in VALUES.values():
        assert COMPENSATION.refusal(make()) is None
        assert CALLBACK.refusal(make()) is not None
    assert COMPENSATION.refusal(dt.datetime.now(dt.UTC)) is None


def test_drain_has_something_to_do(app: Outbox, settings: Settings, engine: Engine) -> None:
    """Without a consumer it warns; without tables it raises, and names the command."""
    with pytest.warns(UserWarning, match="drain consumes nothing: no consumer is declared"):
        testing.drain(app)
    bare = Outbox(engine, settings=Settings(schema="elsewhere"))
    bare.consumer("t", group="g")(lambda message, session: None)
    with pytest.raises(SchemaMissing, match="outbox db upgrade"):
        testing.drain(bare)
