"""The proof where a broker is between the banks: every message of the one is a message of the other, once, in order.

Bank A can't look into bank B's inbox, nor is it asked; the auditor can see both databases, and what the broker has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import JSON, BigInteger, Connection, Table, cast, func, select

from . import states
from .bank_b import LedgerEntry
from .evidence import HALVES, HALVES_B, INBOX, INBOX_A, MESSAGES, MESSAGES_B
from .exchange import Carried
from .message import GROUP, GROUP_A, OUTCOMES, TOPIC
from .sentences import counted, transfers_found


@dataclass(frozen=True, slots=True)
class _Side:
    """The messages of a topic in one database: their bodies, the ids of each key in order, and those consumed."""

    bodies: Mapping[UUID, bytes]
    by_key: Mapping[str, Sequence[UUID]]
    consumed: Collection[UUID]


def faults(a: Connection, b: Connection, carried: Carried) -> Iterator[str]:
    """Compare the topics of both banks, message by message, with each other, with the broker, and with the ledgers."""
    transfers = _side(a, HALVES, MESSAGES, TOPIC), _side(b, HALVES_B, MESSAGES_B, TOPIC, INBOX, GROUP)
    outcomes = _side(b, HALVES_B, MESSAGES_B, OUTCOMES), _side(a, HALVES, MESSAGES, OUTCOMES, INBOX_A, GROUP_A)
    yield from _differ(*transfers, "bank A", "bank B")
    yield from _differ(*outcomes, "bank B", "bank A")
    yield from _out_of_order(b, transfers[1].by_key)
    if carried.ids:
        sent = {str(id_) for id_ in (*transfers[0].bodies, *outcomes[0].bodies)}
        yield from _some("never published, and taken in all the same", sent - carried.ids.keys())
        yield from _some("published, and sent by neither bank", carried.ids.keys() - sent)
    told, refused = _outcomes(b)
    yield from transfers_found("answered more than once", (transfer for transfer, times in told.items() if times > 1))
    back = states.refunds(a)
    yield from transfers_found("refused by bank B, and not refunded", refused - back)
    yield from transfers_found("refunded, and not refused by bank B", back - refused)


def answers(b: Connection) -> int:
    """Return how many messages bank B has sent."""
    return b.scalar(select(func.count()).select_from(HALVES_B).where(HALVES_B.c.topic == OUTCOMES)) or 0


def _side(
    connection: Connection, halves: Table, messages: Table, topic: str, inbox: Table | None = None, group: str = ""
) -> _Side:
    query = (
        select(halves.c.id, halves.c.body, halves.c.key)
        .join(messages, messages.c.half_id == halves.c.id)
        .where(messages.c.topic == topic)
        .order_by(messages.c.queue, messages.c.position)
    )
    bodies, by_key = dict[UUID, bytes](), defaultdict[str, list[UUID]](list)
    for id_, body, key in connection.execute(query):
        bodies[id_] = body
        by_key[key].append(id_)
    if inbox is None:
        return _Side(bodies, by_key, ())
    consumed = select(inbox.c.message_id).where(inbox.c.consumer_group == group, inbox.c.status == "consumed")
    return _Side(bodies, by_key, set(connection.scalars(consumed)))


def _differ(sender: _Side, receiver: _Side, of: str, at: str) -> Iterator[str]:
    yield from _some(f"of {of} never taken in at {at}", sender.bodies.keys() - receiver.bodies.keys())
    yield from _some(f"taken in at {at}, and never sent by {of}", receiver.bodies.keys() - sender.bodies.keys())
    both = sender.bodies.keys() & receiver.bodies.keys()
    yield from _some(
        f"of {of} with another body at {at}", {each for each in both if sender.bodies[each] != receiver.bodies[each]}
    )
    yield from _some(f"of {of} taken in, and not consumed at {at}", receiver.bodies.keys() - set(receiver.consumed))
    mixed = [key for key, ids in sender.by_key.items() if receiver.by_key.get(key, ids) != ids]
    if mixed:
        yield f"{counted(len(mixed), 'key')} of {of} in another order at {at}: {', '.join(sorted(mixed)[:3])}"


def _out_of_order(b: Connection, by_key: Mapping[str, Sequence[UUID]]) -> Iterator[str]:
    """Compare the order of the credits of each account with that of its messages."""
    credited = defaultdict[str, list[UUID]](list)
    for account, message in b.execute(select(LedgerEntry.account_id, LedgerEntry.message_id).order_by(LedgerEntry.id)):
        credited[account].append(message)
    for account, ids in credited.items():
        known = set(ids)
        if [each for each in by_key.get(account, ()) if each in known] != ids:
            yield f"account {account} of bank B was credited in another order than its transfers were sent in"


def _outcomes(b: Connection) -> tuple[Counter[int], set[int]]:
    """Return how often bank B has told the outcome of each transfer, and those that it has refused."""
    body: Any = cast(func.convert_from(HALVES_B.c.body, "UTF8"), JSON)
    of_outcomes = select(cast(body["transfer_id"].as_string(), BigInteger), body["objection"].as_string())
    rows = b.execute(of_outcomes.where(HALVES_B.c.topic == OUTCOMES)).all()
    return Counter(row[0] for row in rows), {transfer for transfer, objection in rows if objection is not None}


def _some(what: str, ids: Collection[Any]) -> Iterator[str]:
    if ids:
        some = ", ".join(sorted(map(str, ids))[:3]) + (", …" if len(ids) > 3 else "")
        yield f"{counted(len(ids), 'message')} {what}: {some}"
