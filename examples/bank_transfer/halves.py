"""Tell how the half messages of bank A were decided: the deciders, the checks before, and the faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from uuid import UUID

from sqlalchemy import ARRAY, ColumnElement, Connection, Uuid, any_, exists, func, literal, select
from sqlalchemy.dialects.postgresql import aggregate_order_by

from .bank_a import Transfer
from .evidence import AMOUNT, CHECKS, HALVES, HISTORY, INBOX, MESSAGES, OF_TRANSFERS, OPS, TRANSFER
from .message import TOPIC
from .sentences import counted, counts_differ, one_each

COMMIT, ROLLBACK = "commit", "rollback"


@dataclass(frozen=True, slots=True)
class Orphan:
    """A half message that the check decided: by fence or checker, with all answers up to the verdict.

    ``executed``: the order was, in the end; by another half message, if the verdict is to roll this one back.
    """

    transfer: int
    asked: str
    answers: tuple[str, ...]
    verdict: str
    executed: bool


@dataclass(frozen=True, slots=True)
class Halves:
    """All half messages of bank A.

    ``decided`` counts by (producer, fence, checker or operator; resolution), ``checks`` by (fence or checker; answer).
    ``outlived`` a check, and were decided by the teller that was still at work. ``dispatched`` have a message.
    """

    written: int
    messages: int
    dispatched: int
    decided: Counter[tuple[str, str]]
    checks: Counter[tuple[str, str]]
    orphans: tuple[Orphan, ...]
    outlived: int
    parked: int
    undecided: int


def waiting(connection: Connection) -> int:
    """Return how many half messages wait for their decision."""
    return connection.scalar(select(func.count()).select_from(CHECKS)) or 0


def read(connection: Connection) -> Halves:
    """Read how bank A's half messages were decided."""
    orphans = tuple(_orphans(connection))
    decided = Counter[tuple[str, str]]((orphan.asked, orphan.verdict) for orphan in orphans)
    by_others = (
        select(OPS.c.decided_by, OPS.c.resolution, func.count())
        .join(HALVES, HALVES.c.id == OPS.c.half_id)
        .where(OF_TRANSFERS, OPS.c.decided_by != "check")
        .group_by(OPS.c.decided_by, OPS.c.resolution)
    )
    for by, resolution, number in connection.execute(by_others):
        decided[by, resolution] += number
    answers = select(HISTORY.c.asked, func.coalesce(HISTORY.c.answer, "none"), func.count()).group_by(
        HISTORY.c.asked, HISTORY.c.answer
    )
    outlived = (
        select(func.count(HISTORY.c.half_id.distinct()))
        .join(OPS, OPS.c.half_id == HISTORY.c.half_id)
        .where(OPS.c.decided_by == "producer")
    )
    of_messages = select(func.count(), func.count(MESSAGES.c.half_id.distinct())).where(MESSAGES.c.topic == TOPIC)
    messages, dispatched = connection.execute(of_messages).one()
    return Halves(
        written=connection.scalar(select(func.count()).where(OF_TRANSFERS)) or 0,
        messages=messages,
        dispatched=dispatched,
        decided=decided,
        checks=Counter({(asked, answer): number for asked, answer, number in connection.execute(answers)}),
        orphans=orphans,
        outlived=connection.scalar(outlived) or 0,
        parked=connection.scalar(select(func.count()).where(CHECKS.c.parked_at.is_not(None))) or 0,
        undecided=connection.scalar(select(func.count()).where(OF_TRANSFERS, ~_decided(COMMIT, ROLLBACK))) or 0,
    )


def faults(
    halves: Halves, a: Connection, b: Connection, transfers: Mapping[int, Decimal], resent: int
) -> Iterator[str]:
    """Compare the decisions with the transfers, the messages (of which ``resent`` are second ones), and bank B's inbox.

    Each transfer has one half that was committed. So a half that was rolled back belongs to no debit; that it belongs
    to no message, and to nothing at bank B, is asked for here.
    """
    if halves.undecided:
        yield f"{counted(halves.undecided, 'half message')} undecided"
    if halves.parked:
        yield f"{counted(halves.parked, 'half message')} parked, which a human has to decide"
    of_ops = select(TRANSFER, AMOUNT).join(OPS, OPS.c.half_id == HALVES.c.id)
    committed = of_ops.where(OF_TRANSFERS, OPS.c.resolution == COMMIT)
    pairs = [(transfer, amount) for transfer, amount in a.execute(committed)]
    yield from one_each("committed half message", transfers, pairs)
    yield from counts_differ("halves with a message", halves.dispatched, "committed half messages", len(pairs))
    of = "halves with a message" + (" and resent ones" if resent else "")
    yield from counts_differ("messages", halves.messages, of, halves.dispatched + resent)

    uncommitted = list(a.scalars(select(HALVES.c.id).where(~_decided(COMMIT))))
    if count := _count_of(a, MESSAGES.c.half_id, uncommitted):
        yield f"{counted(count, 'message')} of half messages that were not committed"
    if count := _count_of(b, INBOX.c.message_id, uncommitted):
        yield f"{counted(count, 'inbox row')} of half messages that were not committed"


def _orphans(connection: Connection) -> Iterator[Orphan]:
    asked, answers = (
        func.array_agg(aggregate_order_by(column, HISTORY.c.id)) for column in (HISTORY.c.asked, HISTORY.c.answer)
    )
    query = (
        select(TRANSFER, OPS.c.resolution, Transfer.id.is_not(None), asked, answers)
        .join(OPS, OPS.c.half_id == HALVES.c.id)
        .outerjoin(HISTORY, HISTORY.c.half_id == HALVES.c.id)
        .outerjoin(Transfer, Transfer.id == TRANSFER)
        .where(OPS.c.decided_by == "check")
        .group_by(HALVES.c.id, OPS.c.half_id, Transfer.id)
        .order_by(OPS.c.decided_at)
    )
    for transfer, verdict, executed, all_asked, all_answers in connection.execute(query):
        by = [asked for asked, answer in zip(all_asked, all_answers, strict=True) if answer == verdict]
        given = tuple(answer or "none" for answer in all_answers)
        yield Orphan(transfer, by[-1] if by else "nobody", given, verdict, executed)


def _decided(*resolutions: str) -> ColumnElement[bool]:
    return exists().where(OPS.c.half_id == HALVES.c.id, OPS.c.resolution.in_(resolutions))


def _count_of(connection: Connection, column: ColumnElement[UUID], ids: list[UUID]) -> int:
    return connection.scalar(select(func.count()).where(column == any_(literal(ids, ARRAY(Uuid))))) or 0
