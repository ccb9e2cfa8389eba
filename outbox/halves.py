"""Find undecided half messages, and see how one was checked. Reads only; the acts are in `outbox.check.operator`."""

from __future__ import annotations

import datetime as dt
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.store import browse
from outbox.store import browse_halves as store
from outbox.store.browse import WINDOW, first, named
from outbox.store.browse_halves import HalfFilter
from outbox.store.dispatch import plan_by_index
from outbox.store.execute import execute
from outbox.store.stats import look_only

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

__all__ = ["WINDOW", "HalfFilter", "HalfPage", "HalfStatus", "HalfView", "ListedHalf", "count_parked", "list_halves",
           "show_half"]  # fmt: skip

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
            look_only(_SECONDS),
            plan_by_index(),
            store.list_undecided(settings.schema, wanted, after, limit, WINDOW),
        )
        end = [] if len(rows) == limit else execute(connection, store.window_end(settings.schema, after, WINDOW))[0]
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
            look_only(_SECONDS),
            plan_by_index(),
            browse.half(schema, half_id, body=body),
            store.check_of(schema, half_id),
            store.history_of(schema, half_id, settings.check_timeout),
            browse.op_of(schema, half_id),
            browse.audit_of(schema, str(half_id)),
        )
    view = HalfView(
        half_id, half=first(browse.HALF, halves), check=first(store.CHECK, checks), op=first(browse.OP, ops)
    )
    view.history = named(store.HISTORY, history)
    view.audit = named(browse.AUDIT, audit)
    if view.half:
        view.raw = view.half.pop("raw")
        # How far the message has come is told by `outbox.messages`.
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
            look_only(_SECONDS),
            plan_by_index(),
            store.count_parked(settings.schema, topic, limit),
        )
    return int(count)
