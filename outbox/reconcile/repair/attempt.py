"""Do a batch at once; where that fails, message by message, so that a bad row never stops the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.reconcile.repair.work import BUSY, Work
from outbox.reconcile.result import Finding
from outbox.text import summary_of

#: Does something about findings of one kind, in transactions of its own; returns the result of each, by id.
Act = Callable[[Work, Sequence[Finding]], dict[UUID, str]]

# Lock not available, deadlock detected, serialization failure.
_BUSY = frozenset({"55P03", "40P01", "40001"})
# So many messages of one batch that can't be had mean that none can: a table is locked, or all of dispatch.
_MOST_BUSY = 3


def attempt(act: Act, work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the result of each message of a batch, whatever goes wrong.

    Raises:
        sqlalchemy.exc.DBAPIError: the connection was lost.
    """
    try:
        return act(work, batch)
    except DBAPIError as error:
        refusal = _refusal(error)
    results: dict[UUID, str] = {}
    vain = 0
    for finding in batch:
        if len(batch) > 1 and vain < _MOST_BUSY:
            try:
                results |= act(work, [finding])
                continue
            except DBAPIError as error:
                refusal = _refusal(error)
                vain += refusal == BUSY
        results[finding.id] = refusal
    return results


def _refusal(error: DBAPIError) -> str:
    code = getattr(error.orig, "sqlstate", None)
    if error.connection_invalidated or code is None:
        raise error
    return BUSY if code in _BUSY else f"refused: {summary_of(error.orig or error)}"
