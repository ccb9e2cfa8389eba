"""What sending costs: one statement for all messages of a transaction, in the round trip of its COMMIT."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from sqlalchemy import Engine, insert, text
from sqlalchemy.orm import Session

from outbox import Outbox, Settings
from outbox.database import at_commit
from outbox.database.execute import Statement, execute
from tests.producer.bank import change, halves, messages
from tests.producer.conftest import SECOND_SCHEMA
from tests.producer.proxy import Proxy


class Wire:
    """The statements that went to the driver since the last reset, ours by whatever way."""

    statements: ClassVar[list[str]] = []


@pytest.fixture
def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The test's engine, with the statements of all its transactions recorded."""

    def spy(connection: Any, *statements: Statement, then_commit: bool = False, **options: Any) -> Any:
        Wire.statements += [statement.sql for statement in statements] + ["COMMIT"] * then_commit
        return execute(connection, *statements, then_commit=then_commit, **options)

    monkeypatch.setattr(at_commit, "execute", spy)
    return engine


def reset() -> None:
    """Forget the statements so far."""
    Wire.statements = []


def ours() -> list[str]:
    """Return the statements that write half messages."""
    return [statement for statement in Wire.statements if "half_message" in statement]


@pytest.mark.parametrize("number", [1, 2, 500])
def test_one_statement_however_many_messages(number: int, counted: Engine, engine: Engine) -> None:
    """One message or five hundred, the transaction pays one statement."""
    outbox = Outbox(counted, settings=Settings(listen=False))
    with Session(counted) as session:
        session.execute(insert(change).values(number=1))
        reset()
        for n in range(number):
            outbox.send(session, "t", {"number": n})
        assert Wire.statements == []
        session.commit()
    assert len(ours()) == 1
    assert messages(engine) == list(range(number))


def test_prepared_and_sent_messages_share_the_statement(counted: Engine, engine: Engine) -> None:
    """Half messages that are prepared go in the same statement as those which are sent."""
    outbox = Outbox(counted, settings=Settings(listen=False))
    with Session(counted) as session, session.begin():
        reset()
        outbox.send(session, "t", {"number": 1})
        outbox.prepare(session, "t", {"number": 2})
        outbox.send(session, "t", {"number": 3}, delay=5)
    assert len(ours()) == 1
    assert [(half.body["number"], half.resolution, half.waits) for half in halves(engine)] == [
        (1, "commit", False),
        (3, "commit", False),
        (2, None, True),
    ]


@pytest.mark.parametrize("listen", [True, False])
@pytest.mark.parametrize("carrier", [Session, Engine.connect])
def test_message_costs_no_further_round_trip(carrier: Any, listen: bool, proxy: Proxy, through: Engine) -> None:
    """Seen from the wire, a commit with messages is one question and one answer, as one without is."""
    outbox = Outbox(through, settings=Settings(listen=listen))

    def round_trips(messages: int) -> int:
        with carrier(through) as used:
            used.execute(text("SELECT 1"))
            for number in range(messages):
                outbox.send(used, "t", {"number": number})
            before = proxy.round_trips
            used.commit()
            return proxy.round_trips - before

    counts = [0, 1, 2, 20]
    # Each connection prepares a statement when it meets it for the first time, which costs its own round trips.
    first = [round_trips(n) for n in counts]
    assert [round_trips(n) for n in counts] == [1, 1, 1, 1], first


def test_commit_goes_out_with_the_message(counted: Engine) -> None:
    """Message and COMMIT are sent in one pipeline, nothing in between waits for an answer."""
    outbox = Outbox(counted, settings=Settings(listen=False))
    with Session(counted) as session:
        session.execute(text("SELECT 1"))
        outbox.send(session, "t", {"number": 1})
        reset()
        session.commit()
    kinds = ["COMMIT" if statement == "COMMIT" else "send" for statement in Wire.statements]
    assert kinds == ["send", "COMMIT"]


def test_two_schemas_two_statements(counted: Engine) -> None:
    """Outboxes of two schemas cost a statement each, also when their messages alternate."""
    first = Outbox(counted, settings=Settings(listen=False))
    second = Outbox(counted, settings=Settings(listen=False, schema=SECOND_SCHEMA))
    with Session(counted) as session:
        reset()
        for number in range(10):
            (second if number % 2 else first).send(session, "t", {"number": number})
        session.commit()
    assert len(ours()) == 2


def test_transaction_without_messages_pays_nothing(counted: Engine) -> None:
    """A transaction that sends nothing, or only in a savepoint that rolled back, runs none of our statements."""
    outbox = Outbox(counted, settings=Settings(listen=False))
    with Session(counted) as session:
        session.execute(text("SELECT 1"))
        reset()
        session.commit()
        assert Wire.statements == []
        session.execute(text("SELECT 1"))
        with session.begin_nested() as savepoint:
            outbox.send(session, "t", {"number": 1})
            savepoint.rollback()
        reset()
        session.commit()
        assert Wire.statements == []
