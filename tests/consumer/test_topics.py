"""Declared topics from end to end: releases of producer and consumer that don't have the same version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy.orm import Session

from outbox import INJECTED, Message, Orphan, Outbox, Outgoing, Topic, testing
from outbox.errors import InvalidHandler, InvalidMessage
from tests.kit.bench import Bench, record


class OrderOne(BaseModel):
    id: int


class OrderTwo(BaseModel):
    number: str


@dataclass
class Parcel:
    weight: float


def first() -> Topic[OrderOne]:
    """Return the topic as the first release knows it."""
    return Topic("t", OrderOne)


def second() -> Topic[OrderTwo]:
    """Return the topic as the second release knows it."""
    topic = Topic("t", OrderTwo, version=2, key=lambda order: order.number)
    topic.upcast(1)(lambda body: {"number": f"A{body['id']}"})
    return topic


def release(bench: Bench, topic: Topic[Any]) -> Outbox:
    """Return the producer's service in the release that knows this form of the topic."""
    bench.app = Outbox(bench.producer, settings=bench.settings)
    bench.app.topic(topic)
    return bench.app


def test_a_consumer_reads_what_all_releases_sent(bench: Bench) -> None:
    """Before the topic was declared, by its first version and by its second: the handler sees the newest only."""
    bench.send({"id": 1})
    release(bench, first())
    bench.send(OrderOne(id=2))
    release(bench, second())
    bench.send(OrderTwo(number="B3"))
    bodies: list[Any] = []

    def handle(message: Message, session: Session) -> None:
        bodies.append(message.body)

    bench.consume(bench.declare(handle, model=second()))
    assert sorted(bodies, key=lambda body: body.number) == [
        OrderTwo(number="A1"),
        OrderTwo(number="A2"),
        OrderTwo(number="B3"),
    ]


def test_a_rollout_heals_a_newer_version(bench: Bench) -> None:
    """The older release fails at it and tries again; when the newer one has come, the message is consumed."""
    release(bench, second())
    bench.send(OrderTwo(number="B1"))

    def handle(message: Message, session: Session) -> None:
        assert message.body is not None
        record(message, session)

    older = bench.declare(handle, model=first())
    bench.consume(older)
    ((status, attempts),) = bench.statuses()
    ((row,),) = [bench.inbox().values()]
    assert (status, attempts) == ("failed", 1)
    assert "VersionUnknown: a message of topic 't' is of version 2, newer than this code's 1" in (row.error or "")
    newer = bench.declare(handle, model=second(), early=True)
    assert bench.retry(newer).done == 1
    assert bench.statuses() == [("consumed", 2)]


def test_a_body_that_fits_no_version_is_parked_without_its_values(bench: Bench) -> None:
    """Later it won't be readable either; the error names the field, and not what is in it."""
    bench.send({"id": "hunter2"})

    def handle(message: Message, session: Session) -> None:
        assert message.body is not None

    bench.consume(bench.declare(handle, model=first()))
    ((row,),) = [bench.inbox().values()]
    assert (row.status, "id: Input should be a valid integer" in (row.error or "")) == ("parked", True)
    assert "hunter2" not in (row.error or "")


@pytest.mark.parametrize("body", [{"id": "x"}, OrderTwo(number="B1"), b"{}", "text", None])
def test_what_does_not_fit_is_not_sent(bench: Bench, body: Any) -> None:
    """Neither by the topic nor by its name; nothing is written."""
    app = release(bench, first())
    for named in ("t", app.topics["t"]):
        with Session(bench.producer) as session, session.begin():
            with pytest.raises(InvalidMessage, match="a body of topic 't' must be a OrderOne: "):
                app.send(session, named, body)
            with pytest.raises(InvalidMessage, match="a body of topic 't' must be a OrderOne: "):
                app.prepare(session, named, body)
    bench.dispatch()
    assert bench.messages() == []


def test_the_key_and_the_version_come_from_the_topic(bench: Bench) -> None:
    """A key that a send names goes over the topic's; other headers stay."""
    app = release(bench, second())
    with Session(bench.producer) as session, session.begin():
        app.send(session, "t", {"number": "B1"}, headers={"campaign": "spring"})
        app.send(session, app.topics["t"], OrderTwo(number="B2"), key="mine")
    assert bench.rows("SELECT key FROM outbox.half_message ORDER BY id") == ["B1", "mine"]
    assert bench.rows("SELECT headers FROM outbox.half_message ORDER BY id") == [
        {"campaign": "spring", "outbox-version": "2"},
        {"outbox-version": "2"},
    ]


def test_decorators_and_checkers_know_the_topic(bench: Bench) -> None:
    """What a decorated function returns is checked against the model; a checker gets the model."""
    app = Outbox(bench.producer, settings=bench.settings)
    parcels = app.topic("parcels", model=Parcel, key=lambda parcel: str(parcel.weight))
    asked: list[Any] = []

    @app.transactional(topic=parcels)
    def pack(weight: Any, session: Session = INJECTED) -> Outgoing:
        return Outgoing({"weight": weight})

    @app.checker(parcels)
    def was_packed(orphan: Orphan) -> None:
        asked.append(orphan.body)

    pack(2.5)
    with pytest.raises(InvalidMessage, match="weight: Input should be a valid number"):
        pack("heavy")
    with Session(bench.producer) as session, session.begin():
        app.prepare(session, parcels, Parcel(1.5))
    testing.check(app)
    assert asked == [Parcel(1.5)]
    assert bench.rows("SELECT key FROM outbox.half_message ORDER BY id") == ["2.5", "1.5"]


def consume(app: Outbox) -> None:
    """Declare a consumer that reads plain JSON."""
    app.consumer("t", group="g")(lambda message, session: None)


def check(app: Outbox) -> None:
    """Declare a checker that reads plain JSON."""
    app.checker("t")(lambda orphan: None)


def compensate(app: Outbox) -> None:
    """Declare a compensation that reads plain JSON."""
    app.compensation("t")(lambda message, session: None)


def confirm(app: Outbox) -> None:
    """Declare a callback that reads plain JSON."""
    app.on_delivered("t")(lambda delivery, session: None)


def announce(app: Outbox) -> None:
    """Declare another one."""
    app.on_parked("t")(lambda letter, session: None)


@pytest.mark.parametrize("declare", [consume, check, compensate, confirm, announce])
def test_a_topic_is_declared_before_its_readers(bench: Bench, declare: Callable[[Outbox], None]) -> None:
    """Else a reader would get what it doesn't expect, by the order of two imports."""
    app = Outbox(bench.producer, settings=bench.settings)
    declare(app)
    with pytest.raises(InvalidHandler, match="declare the topic before it"):
        app.topic(first())


def test_a_reader_may_have_a_model_of_its_own(bench: Bench) -> None:
    """It reads less, or something else; the topic doesn't change that."""
    app = Outbox(bench.producer, settings=bench.settings)
    app.consumer("t", group="g", model=dict)(lambda message, session: None)
    app.topic(first())
    app.consumer("t", group="h")(lambda message, session: None)
    assert [each.model for each in app.subscriptions.values()] == [dict, app.topics["t"]]


def test_a_topic_is_one(bench: Bench) -> None:
    """The same declaration may be named again; another one is refused, wherever it is named."""
    app = Outbox(bench.producer, settings=bench.settings)
    topic = app.topic(first())
    assert app.topic(topic) is topic
    with pytest.raises(InvalidHandler, match=r"'t' is declared already, as Topic\('t', OrderOne, version=1\)"):
        app.topic("t", model=OrderTwo)
    with pytest.raises(InvalidHandler, match="is declared already"):
        app.consumer(second(), group="g")


def test_tenants_share_their_topics(bench: Bench) -> None:
    """What is declared on one counts for all that are made of it."""
    app = Outbox(settings=bench.settings)
    tenant = app.bound_to(bench.producer)
    app.topic(first())
    with Session(bench.producer) as session, session.begin(), pytest.raises(InvalidMessage, match="OrderOne"):
        tenant.send(session, "t", {"id": "x"})
