"""Random nestings of savepoints: the messages written are those beside whose change the database kept."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, insert
from sqlalchemy.orm import Session

from outbox import Outbox
from tests.kit import tries
from tests.producer.bank import Account, change, changes, leftovers, messages

Step = tuple[Literal["send", "begin", "release", "rollback", "close", "root commit", "root rollback"], int]

#: The number says how many levels up a savepoint is ended, or by which way a change is written.
steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["send", "send", "send", "begin", "begin", "release", "rollback", "close", "root commit", "root rollback"]
        ),
        st.integers(0, 2),
    ),
    min_size=3,
    max_size=25,
)

_numbers = itertools.count()


@dataclass
class Walk:
    """One carrier driven by steps; the database itself, by the business table, says what is right."""

    outbox: Outbox
    carrier: Any
    open: list[Any] = field(default_factory=list)

    def do(self, step: Step) -> None:
        kind, n = step
        match kind:
            case "send":
                self.write(next(_numbers), n)
            case "begin":
                self.open.append(self.carrier.begin_nested())
            case "root commit":
                # Ends all that is still open.
                self.open.clear()
                self.carrier.commit()
            case "root rollback":
                self.open.clear()
                self.carrier.rollback()
            case _:
                self.end(kind, n)

    def write(self, number: int, n: int) -> None:
        """Change, then message; message, then change; or, in a session, the change left to a later flush."""
        if n == 0:
            self.outbox.send(self.carrier, "t", {"number": number})
        if n == 2 and isinstance(self.carrier, Session):
            self.carrier.add(Account(id=number, owner=str(number)))
        self.carrier.execute(insert(change).values(number=number))
        if n != 0:
            self.outbox.send(self.carrier, "t", {"number": number})

    def end(self, how: str, levels: int) -> None:
        """End a savepoint; one further out takes those inside along, where SQLAlchemy allows that."""
        if not self.open:
            return
        if isinstance(self.carrier, Connection) or how == "close":
            levels = 0
        del self.open[max(0, len(self.open) - levels) :]
        if self.open:
            getattr(self.open.pop(), {"release": "commit"}.get(how, how))()


@pytest.mark.parametrize("kind", ["Session", "Connection", "joined Session"])
@settings(max_examples=tries(10), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(walk=steps)
def test_messages_follow_the_database(kind: str, walk: list[Step], engine: Engine, outbox: Outbox) -> None:
    """Whatever was begun, released, rolled back and closed: the messages are those whose change stayed, in order."""
    with engine.connect() as connection:
        carrier: Any = connection
        if kind == "Session":
            carrier = Session(engine)
        elif kind == "joined Session":
            connection.begin()
            carrier = Session(connection, join_transaction_mode="create_savepoint")
        walker = Walk(outbox, carrier)
        for step in walk:
            note(str(step))
            walker.do(step)
        carrier.commit()
        if isinstance(carrier, Session):
            carrier.close()
        if kind == "joined Session":
            connection.commit()
    sent = messages(engine)
    assert set(sent) == changes(engine)
    assert sent == sorted(sent)
    assert leftovers(engine) == 0
