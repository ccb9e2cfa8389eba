"""The status of a message on the producer's side, as SQL: declared once, for lists, acts and the reconciliation."""

from __future__ import annotations

from collections.abc import Callable

_IS_MESSAGE = "EXISTS (SELECT FROM {s}.message m WHERE m.half_id = h.id)"


def message_status(
    *,
    is_message: str = _IS_MESSAGE,
    of_committed: str = "",
    of_undispatched: str = "",
    value: Callable[[str], str] = "'{}'".format,
) -> str:
    """Return the expression that tells how far a half message ``h`` with its op ``o`` and its schedule ``d`` has come.

    ``is_message`` is the condition that the message is in a queue. ``of_committed`` and ``of_undispatched`` are WHEN
    clauses for finer states of what is committed, and of what is neither in a queue nor scheduled. ``value`` returns
    the SQL of a status. A message in a queue has no schedule, and a recalled one is in no queue, so that the order of
    these cases doesn't matter. The schema is ``{s}``.
    """
    return f"""CASE WHEN o.half_id IS NULL THEN {value("undecided")}
            WHEN o.resolution = 'rollback' THEN {value("rolled_back")}{of_committed}
            WHEN d.recalled_at IS NOT NULL THEN {value("recalled")}
            WHEN d.half_id IS NOT NULL THEN {value("scheduled")}
            WHEN {is_message} THEN {value("dispatched")}{of_undispatched}
            ELSE {value("committed")} END"""
