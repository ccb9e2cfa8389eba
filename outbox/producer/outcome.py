"""What came of each call of a decorated function: its message and its decision, for a caller that asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from outbox.message.model import Resolution


@dataclass(slots=True, eq=False)
class CallOutcome:
    """What came of one call of a function that ``@outbox.two_phase`` or ``@outbox.transactional`` decorates.

    ``function`` is its name with its module. ``message_id``: of ``@two_phase`` that of its half message, None until
    this is committed; of ``@transactional`` that of the message sent, None if it sent none.

    ``resolution``: of ``@two_phase`` UNKNOWN while the half is undecided, and to be left to the check if the call has
    ended so; COMMIT or ROLLBACK as soon as this call knows the decision, whether its own or a checker's or an
    operator's. Of ``@transactional`` COMMIT when the function's own transaction has committed; None in the transaction
    of a caller, which decides.
    """

    function: str
    topic: str
    message_id: UUID | None = None
    resolution: Resolution | None = None


#: The lists of the `outcomes` blocks around the running code.
_lists: ContextVar[tuple[list[CallOutcome], ...]] = ContextVar("outbox_outcomes", default=())


@contextmanager
def outcomes() -> Iterator[list[CallOutcome]]:
    """Yield a list that gets an `CallOutcome` for each call of a decorated function within a with block.

    In the order in which the calls began, so that of a function that calls others comes before theirs; also of calls
    that raise, for the list can be read after the block. It is for the block's thread or task, and for the tasks that
    are begun in it.
    """
    outcomes: list[CallOutcome] = []
    token = _lists.set((*_lists.get(), outcomes))
    try:
        yield outcomes
    finally:
        _lists.reset(token)


def new_outcome(function: str, topic: str) -> CallOutcome:
    """Return the outcome of a call that begins, and tell it to the blocks around the call."""
    outcome = CallOutcome(function, topic)
    for each in _lists.get():
        each.append(outcome)
    return outcome
