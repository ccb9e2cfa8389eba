"""Bodies that are stored compressed: nobody who reads them notices, and nothing is judged otherwise."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import Message, Orphan, Outbox, Resolution, Settings
from outbox.errors import InvalidMessage
from outbox.operator.model import InboxFilter, MessageFilter, PageRequest
from outbox.testing import bulk, capture, check, drain, sent_messages
from tests.kit import Tables

BODY = {"lines": ["the same line"] * 1000, "order": {"id": 42}}
RAW = json.dumps(BODY, separators=(",", ":")).encode()
STORED = text(
    "SELECT octet_length(h.body), h.headers ->> 'outbox-encoding', h.body_digest,"
    " (SELECT c.body_digest FROM outbox.consumer_message c WHERE c.message_id = h.id)"
    "  FROM outbox.half_message h WHERE h.id = :id"
)


@pytest.fixture
def app(engine: Engine) -> Outbox:
    """An Outbox that compresses what has more than a thousand bytes."""
    return Outbox(engine, settings=Settings(immunity=0.0, compress_above=1000, max_body_bytes=100_000))


def send(app: Outbox, body: Any, **options: Any) -> UUID:
    """Send a message in a transaction of its own."""
    assert isinstance(app.engine, Engine)
    with app.engine.begin() as connection:
        return app.send(connection, "t", body, **options)


def stored(app: Outbox, half_id: UUID) -> tuple[int, str | None]:
    """Return how many bytes a body has in the table, and what its header says."""
    assert isinstance(app.engine, Engine)
    with app.engine.connect() as connection:
        size, encoding, *digests = connection.execute(STORED, {"id": half_id}).one()
    assert digests[1] in {None, digests[0]}
    return size, encoding


def handled(app: Outbox, **options: Any) -> list[Message]:
    """Return the messages that a handler gets."""
    messages: list[Message] = []

    def handler(message: Any, _: Session) -> None:
        messages.extend(message if options.get("takes_batch") else [message])

    app.consumer("t", group="g", **options)(handler)
    drain(app)
    return messages


@pytest.mark.parametrize("options", [{}, {"batch": 10, "takes_batch": True}])
def test_a_handler_gets_what_was_sent(app: Outbox, options: dict[str, Any]) -> None:
    """Body, bytes and headers are the sender's; the digest in the inbox is that of the producer's table."""
    half_id = send(app, BODY, headers={"campaign": "spring"})
    (message,) = handled(app, **options)
    assert (message.body, message.raw, message.headers) == (BODY, RAW, {"campaign": "spring"})
    size, encoding = stored(app, half_id)
    assert (size < len(RAW) / 10, encoding) == (True, "gzip")


@pytest.mark.parametrize(
    "body", [b"x" * 1000, os.urandom(5000)], ids=["not above the threshold", "no smaller when it is compressed"]
)
def test_what_is_not_worth_it_stays_as_it_is(app: Outbox, body: bytes) -> None:
    """What is small, and what can't be made smaller, is stored as it is."""
    assert stored(app, send(app, body)) == (len(body), None)
    assert [message.raw for message in handled(app)] == [body]


def test_nothing_is_compressed_unless_asked_for(engine: Engine) -> None:
    """The default is off."""
    app = Outbox(engine)
    assert stored(app, send(app, BODY)) == (len(RAW), None)


def test_what_a_handler_sends_on(app: Outbox, engine: Engine) -> None:
    """Headers can be handed on with the body, and raw bytes as well."""

    @app.consumer("t", group="forward")
    def forward(message: Message, session: Session) -> None:
        app.send(session, "next", message.body, headers=message.headers)
        app.send(session, "next", message.raw, headers=message.headers, content_type=message.content_type)

    send(app, BODY)
    drain(app)
    assert [message.body for message in sent_messages(app) if message.topic == "next"] == [BODY, BODY]
    assert [message.headers for message in sent_messages(app)] == [{}, {}, {}]


def test_the_limits_are_those_of_the_body(app: Outbox) -> None:
    """A body that is too large is refused, however small it would be compressed."""
    with pytest.raises(InvalidMessage, match="the body has 100001 bytes; at most 100000"):
        send(app, b"x" * 100_001)
    assert list(sent_messages(app)) == []


def test_a_reader_never_takes_more_than_its_limit(app: Outbox, engine: Engine) -> None:
    """What decompresses to more than the reader allows parks its message, which is retried with a higher limit."""
    half_id = send(app, BODY)
    small = Outbox(engine, settings=Settings(max_body_bytes=len(RAW) - 1))
    small.consumer("t", group="g")(lambda message, session: message.body)
    drain(small)
    (row,) = small.operator.inbox(InboxFilter(), PageRequest()).items
    assert (row.status, "more than" in (row.last_error or "")) == ("parked", True)
    app.operator.retry(half_id, group="g", by="ann")
    assert [message.body for message in handled(app)] == [BODY]


def test_the_header_is_not_for_senders(app: Outbox) -> None:
    """What would make readers decompress what isn't compressed is refused."""
    with pytest.raises(InvalidMessage, match="header 'outbox-encoding' is for compressed bodies alone"):
        send(app, BODY, headers={"outbox-encoding": "gzip"})


def test_a_checker_and_a_compensation_read_it_too(app: Outbox, engine: Engine) -> None:
    """Wherever a body is read, it is decompressed."""
    bodies: list[Any] = []

    @app.checker("t")
    def ask(orphan: Orphan) -> Resolution:
        bodies.append((orphan.body, orphan.headers))
        return Resolution.COMMIT

    @app.compensation("t")
    def undo(message: Message, session: Session) -> None:
        bodies.append((message.body, message.headers))

    with engine.begin() as connection:
        half_id = app.prepare(connection, "t", BODY)
    assert check(app).done == 1
    app.operator.compensate(half_id, by="ann", why="a test")
    bulk(app)
    assert bodies == [(BODY, {}), (BODY, {})]


def test_what_is_captured_is_decompressed(app: Outbox) -> None:
    """A test without a database sees body and headers as they were given."""
    with capture(app) as captured:
        app.send(None, "t", BODY)  # type: ignore[call-overload]  # a captured send takes any carrier
    assert [(message.body, message.headers) for message in captured] == [(BODY, {})]


def by_body(app: Outbox) -> list[UUID]:
    """Return the messages that are found by a value in their bodies."""
    found = app.operator.messages(MessageFilter(body=("order.id", "42")), PageRequest())
    return [row.id for row in found.items]


def test_operators_see_the_body(app: Outbox, engine: Engine) -> None:
    """It is shown and found by its values, and its size is the body's; of a damaged one the bytes stay, and no more."""
    half_id = send(app, BODY)
    body = app.operator.message(half_id).body
    assert body is not None
    assert (json.loads(body.text or ""), body.size) == (BODY, len(RAW))
    assert app.operator.body(half_id) == ("application/json", RAW)
    assert by_body(app) == [half_id]
    damaged = b"no gzip"
    Tables(engine).run("UPDATE outbox.half_message SET body = :damaged", damaged=damaged)
    assert app.operator.body(half_id) == ("application/json", damaged)
    shown = app.operator.message(half_id).body
    assert shown is not None
    assert (shown.text, shown.size) == (None, None)
    assert by_body(app) == []


def test_the_same_body_has_the_same_digest(app: Outbox, engine: Engine) -> None:
    """What two services compare doesn't depend on when it was compressed."""
    first, second = send(app, BODY), send(app, BODY)
    with engine.connect() as connection:
        bodies = connection.execute(text("SELECT body, body_digest FROM outbox.half_message")).all()
    assert first != second
    assert {bytes(digest) for _, digest in bodies} == {hashlib.sha256(bodies[0][0]).digest()[:16]}
