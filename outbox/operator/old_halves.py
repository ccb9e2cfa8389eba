"""Find undecided half messages, and see how one was checked. The acts are in `outbox.operator.undecided`."""

from __future__ import annotations

import datetime as dt
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import execute
from outbox.database.sql import plan_by_index, read_only
from outbox.operator import old_halves_sql
from outbox.operator.look import messages_sql
from outbox.operator.look.messages_sql import BROWSE_WINDOW, first, named
from outbox.operator.old_halves_sql import HalfFilter

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

__all__ = ["BROWSE_WINDOW", "HalfFilter", "HalfPage", "HalfStatus", "HalfView", "ListedHalf", "count_parked",
           "list_halves", "show_half"]  # fmt: skip

_SECONDS = 10.0


class HalfStatus(enum.StrEnum):
    """How an undecided half stands: left alone so far, its check due, asked about and waiting, or over its checks."""

    IMMUNE = "immune"
    ORPHAN = "orphan"
    WAITING = "waiting"
    PARKED = "parked"


@dataclass(frozen=True, slots=True)
class ListedHalf:
    """An undecided half in a list; ``age`` and ``next_check_in`` (negative: overdue) are seconds.

    ``key``, ``born_at`` and ``age`` are None where the half message is gone. ``last_answer`` and ``last_error`` (its
    first line) are None while it is ``being_asked``, which can't be told from a worker that died over it until its
    claim runs out.
    """

    id: UUID
    topic: str
    key: str | None
    status: str
    born_at: dt.datetime | None
    age: float | None
    fenced: bool
    checks: int
    being_asked: bool
    last_answer: str | None
    last_error: str | None
    checked_at: dt.datetime | None
    next_check_at: dt.datetime
    next_check_in: float
    parked_at: dt.datetime | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class HalfPage:
    """A page of a list, the oldest first.

    ``next`` is the id to go on after; None at the end. ``exhausted``: the page isn't full since the search stopped
    after `WINDOW` halves; going on after ``next`` may find more.
    """

    halves: list[ListedHalf]
    next: UUID | None
    exhausted: bool


@dataclass(slots=True)
class HalfView:
    """All that is known of one half and its checks; parts that aren't there are None or empty.

    ``status`` is a `HalfStatus`, or ``committed`` or ``rolled_back``. ``history`` has an entry for each check, whose
    ``state`` is ``answered``, ``being_asked``, or ``no_answer``: the worker died over it, or was cut off.
    """

    id: UUID
    status: str | None = None
    half: dict[str, Any] | None = None
    check: dict[str, Any] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    op: dict[str, Any] | None = None
    audit: list[dict[str, Any]] = field(default_factory=list)
    raw: bytes | None = None

    @property
    def known(self) -> bool:
        """Is there any trace of the half?"""
        return bool(self.half or self.check or self.op or self.history or self.audit)


def list_halves(
    connection: Connection, settings: Settings, wanted: HalfFilter, *, after: UUID | None = None, limit: int = 50
) -> HalfPage:
    """Return the oldest undecided halves that fit; ``after`` is ``next`` of the page before.

    ``connection`` must not be in a transaction; runs one that only reads.
    """
    with connection.begin():
        *_, rows = execute(
            connection,
            read_only(_SECONDS),
            plan_by_index(),
            old_halves_sql.list_undecided(settings.schema, wanted, after, limit, BROWSE_WINDOW),
        )
        end = (
            []
            if len(rows) == limit
            else execute(connection, old_halves_sql.window_end(settings.schema, after, BROWSE_WINDOW))[0]
        )
    found = [ListedHalf(*row) for row in rows]
    if len(found) == limit:
        return HalfPage(found, found[-1].id, exhausted=False)
    return HalfPage(found, end[0][0] if end else None, exhausted=bool(end))


def show_half(connection: Connection, settings: Settings, half_id: UUID, *, body: bool = False) -> HalfView:
    """Return all that is known of a half, decided or not, with its body in ``raw`` if wanted.

    ``connection`` must not be in a transaction; runs one that only reads.
    """
    schema = settings.schema
    with connection.begin():
        *_, halves, checks, history, ops, audit = execute(
            connection,
            read_only(_SECONDS),
            plan_by_index(),
            messages_sql.half(schema, half_id, body=body),
            old_halves_sql.check_of(schema, half_id),
            old_halves_sql.history_of(schema, half_id, settings.check_timeout),
            messages_sql.op_of(schema, half_id),
            messages_sql.audit_of(schema, str(half_id)),
        )
    view = HalfView(
        half_id,
        half=first(messages_sql.HALF, halves),
        check=first(old_halves_sql.CHECK, checks),
        op=first(messages_sql.OP, ops),
    )
    view.history = named(old_halves_sql.HISTORY, history)
    view.audit = named(messages_sql.AUDIT, audit)
    if view.half:
        view.raw = view.half.pop("raw")
        # How far the message has come is told by `outbox.operator.old_messages`.
        del view.half["status"]
    if view.op:
        view.status = "committed" if view.op["resolution"] == "commit" else "rolled_back"
    elif view.check:
        view.status = view.check["status"]
    return view


def count_parked(connection: Connection, settings: Settings, topic: str | None, limit: int) -> int:
    """Return how many halves are parked, ``limit`` at most; ``topic`` None: of all topics."""
    with connection.begin():
        *_, ((count,),) = execute(
            connection,
            read_only(_SECONDS),
            plan_by_index(),
            old_halves_sql.count_parked(settings.schema, topic, limit),
        )
    return int(count)
