"""Bodies in a format of the application's own, from the send to handler, checker and compensation."""

from __future__ import annotations

import datetime as dt
import plistlib
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import Message, Orphan, Outbox, Outgoing, Resolution, Settings
from outbox.errors import InvalidMessage
from outbox.testing import bulk, capture, check, drain, sent_messages

PLIST = "application/x-plist"
BODY = {"at": dt.datetime(2026, 11, 23), "raw": b"\0\xff"}  # noqa: DTZ001 - as a property list has it


class Order(BaseModel):
    """What a topic in this format carries."""

    id: int
    total: Decimal


@pytest.fixture
def app(engine: Engine) -> Outbox:
    """An Outbox with a codec."""
    app = Outbox(engine, settings=Settings(immunity=0.0))
    app.codec(PLIST, encode=lambda body: plistlib.dumps(body, fmt=plistlib.FMT_BINARY), decode=plistlib.loads)
    return app


def handled(app: Outbox, topic: str, group: str = "g", **options: Any) -> list[Any]:
    """Return the bodies that a handler of a topic gets."""
    bodies: list[Any] = []

    def handler(message: Any, _: Session) -> None:
        bodies.extend(each.body for each in (message if options.get("takes_batch") else [message]))

    app.consumer(topic, group=group, **options)(handler)
    drain(app)
    return bodies


@pytest.mark.parametrize("options", [{}, {"batch": 10, "takes_batch": True}])
def test_from_the_send_to_the_handler(app: Outbox, engine: Engine, options: dict[str, Any]) -> None:
    """The sender chooses message by message; each is read by its own content type."""
    with Session(engine) as session, session.begin():
        app.send(session, "t", BODY, key="k", content_type=PLIST)
        app.send(session, "t", {"a": 1}, key="k")
        app.send(session, "t", b"\x89PNG", key="k", content_type="image/png")
    assert handled(app, "t", **options) == [BODY, {"a": 1}, b"\x89PNG"]
    assert [message.body for message in sent_messages(app)] == [BODY, {"a": 1}, b"\x89PNG"]


def test_a_decorated_function_chooses_by_outgoing(app: Outbox) -> None:
    """`Outgoing` takes the option as `send` does."""

    @app.transactional(topic="t")
    def create(session: Session) -> Outgoing:
        return Outgoing(BODY, content_type=PLIST)

    create()
    assert handled(app, "t") == [BODY]


def test_a_topic_in_another_format(app: Outbox, engine: Engine) -> None:
    """All that is sent of the topic is in its format; the handler gets the model."""
    app.topic("orders", model=Order, content_type=PLIST)
    with Session(engine) as session, session.begin():
        app.send(session, "orders", {"id": 7, "total": "12.50"})
    with engine.connect() as connection:
        found = connection.execute(text("SELECT content_type, body FROM outbox.half_message")).one()
    assert (found[0], plistlib.loads(found[1])) == (PLIST, {"id": 7, "total": "12.50"})
    assert handled(app, "orders") == [Order(id=7, total=Decimal("12.50"))]


def test_a_service_without_the_codec(app: Outbox, engine: Engine) -> None:
    """It gets the bytes."""
    with Session(engine) as session, session.begin():
        app.send(session, "t", BODY, content_type=PLIST)
    (raw,) = handled(Outbox(engine), "t")
    assert plistlib.loads(raw) == BODY


def test_a_body_that_can_not_be_encoded_changes_nothing(app: Outbox, engine: Engine) -> None:
    """The send is refused by the call itself; the transaction goes on."""
    with Session(engine) as session:
        with pytest.raises(InvalidMessage, match="can't be encoded by the codec"):
            app.send(session, "t", {"a": object()}, content_type=PLIST)
        with pytest.raises(InvalidMessage, match="register a codec"):
            app.send(session, "t", {"a": 1}, content_type="application/msgpack")
        session.commit()
    assert list(sent_messages(app)) == []


def test_what_is_captured_is_decoded(app: Outbox) -> None:
    """A test without a database sees the body, not its bytes."""
    with capture(app) as captured:
        app.send(None, "t", BODY, content_type=PLIST)  # type: ignore[call-overload]  # a captured send takes any carrier
    assert [message.body for message in captured] == [BODY]


def test_a_checker_and_a_compensation_read_it_too(app: Outbox, engine: Engine) -> None:
    """Wherever a body is read, the codec reads it."""
    bodies: list[Any] = []

    @app.checker("t")
    def ask(orphan: Orphan) -> Resolution:
        bodies.append(orphan.body)
        return Resolution.COMMIT

    @app.compensation("t")
    def undo(message: Message, session: Session) -> None:
        bodies.append(message.body)

    with Session(engine) as session, session.begin():
        half_id = app.prepare(session, "t", BODY, content_type=PLIST)
    assert check(app).done == 1
    app.operator.compensate(half_id, by="ann", why="a test")
    bulk(app)
    assert bodies == [BODY, BODY]
