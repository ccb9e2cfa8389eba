"""Try, confirm, cancel (TCC): a participant's three functions, of which each takes effect once at most, in any order.

A coordinator of a transaction calls *try* of each participant, then *confirm* of all or *cancel* of all; by messages or
by HTTP, again and again until it is answered. So a participant may be called twice, and out of order. Each call takes
the row of its branch first (``tcc_branch``: one for a transaction, a branch and a participant), in the transaction of
its effect:

- **duplicates**: what the row says already is done; the function isn't called again;
- **empty compensation**: a cancel before, or without, its try is written down, and has no effect;
- **hanging**: a try that comes after its cancel is refused, so that nothing stays reserved for ever.

The row is unique. Of two calls at the same moment, on whatever connections, the second waits for the end of the first,
and then sees what it did; of one that was killed, nothing.

A call with an AsyncSession returns what to await. Its work is the same, inside ``run_sync``.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload
from uuid import UUID

from outbox.calling.engine import call_with
from outbox.calling.function import CalledFunction, CalledFunctions
from outbox.database.execute import execute
from outbox.errors import BranchCancelled, BranchConfirmed, BranchUnknown, InvalidHandler, InvalidMessage
from outbox.flow import sql
from outbox.message.answer import FUNCTION, CalledKind
from outbox.message.content import MAX_KEY_BYTES, check_group, check_text

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from outbox.app import Outbox

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class BranchState(enum.StrEnum):
    """What the last call that took effect has made of a branch."""

    TRIED = "tried"
    CONFIRMED = "confirmed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Branch(Generic[T]):
    """What a function is called with: the transaction, the branch in it, and what the caller has said of it."""

    transaction_id: UUID
    branch: str
    body: T


@dataclass(frozen=True, slots=True, kw_only=True)
class _BranchFunction(CalledFunction):
    """One of the three functions of a participant, whose name stands for a topic."""

    kind: ClassVar[CalledKind] = FUNCTION
    decorator: ClassVar[str] = "participant"
    forms: ClassVar[tuple[tuple[str, ...], ...]] = (("branch", "session"),)
    state: BranchState

    @property
    def what(self) -> str:
        """What it is called in texts."""
        return f"participant {self.topic!r}: the function to be {self.state.value}"

    @property
    def key(self) -> BranchState:
        """What there is one for."""
        return self.state


@dataclass(slots=True)
class Participant(Generic[T]):
    """One service's part in transactions of try, confirm and cancel, in the database of its `Outbox`.

    Its three functions take ``(branch, session)``, and change what they change with that session; it is the caller's,
    which commits it. To be declared by the decorators `on_try`, `on_confirm` and `on_cancel`. They may be async: then
    the participant is called with an AsyncSession, which they get. Plain ones get the Session inside of it there.

    Raises:
        InvalidMessage: the name isn't one.
    """

    outbox: Outbox
    name: str
    _functions: CalledFunctions = field(default_factory=CalledFunctions)

    def __post_init__(self) -> None:
        check_group(self.name)

    def on_try(self, function: F) -> F:
        """Decorate what reserves; it may raise to refuse, which undoes all of the caller's transaction.

        Raises:
            InvalidHandler: there is one already, or it can't be called so.
        """
        return self._declare(BranchState.TRIED, function)

    def on_confirm(self, function: F) -> F:
        """Decorate what makes a reservation final; otherwise as `on_try`."""
        return self._declare(BranchState.CONFIRMED, function)

    def on_cancel(self, function: F) -> F:
        """Decorate what gives a reservation up; otherwise as `on_try`."""
        return self._declare(BranchState.CANCELLED, function)

    @overload
    def attempt(self, session: Session, transaction_id: UUID, body: T, *, branch: str = "") -> bool: ...
    @overload
    def attempt(self, session: AsyncSession, transaction_id: UUID, body: T, *, branch: str = "") -> Awaitable[bool]: ...
    def attempt(self, session: Any, transaction_id: UUID, body: T, *, branch: str = "") -> Any:
        """Try, with the transaction of a session; False if that was done before.

        Raises:
            BranchCancelled: it was cancelled before: nothing is reserved any more.
            InvalidMessage: the id isn't a UUID, or the branch has more than 255 bytes or spaces around it.
            InvalidHandler: what reserves isn't declared, or is async and the session isn't.
        """
        return _with(session, self._attempt, Branch(transaction_id, branch, body))

    @overload
    def confirm(self, session: Session, transaction_id: UUID, body: T, *, branch: str = "") -> bool: ...
    @overload
    def confirm(self, session: AsyncSession, transaction_id: UUID, body: T, *, branch: str = "") -> Awaitable[bool]: ...
    def confirm(self, session: Any, transaction_id: UUID, body: T, *, branch: str = "") -> Any:
        """Confirm, with the transaction of a session; False if that was done before.

        It waits for the end of a try that is under way.

        Raises:
            BranchCancelled: it was cancelled before.
            BranchUnknown: it was never tried.
            InvalidMessage: as `attempt`.
            InvalidHandler: what confirms isn't declared, or is async and the session isn't.
        """
        return _with(session, self._confirm, Branch(transaction_id, branch, body))

    @overload
    def cancel(self, session: Session, transaction_id: UUID, body: T, *, branch: str = "") -> bool: ...
    @overload
    def cancel(self, session: AsyncSession, transaction_id: UUID, body: T, *, branch: str = "") -> Awaitable[bool]: ...
    def cancel(self, session: Any, transaction_id: UUID, body: T, *, branch: str = "") -> Any:
        """Cancel, with the transaction of a session; False if that was done before, or there was nothing to cancel.

        Before its try, it is only written down: the try will be refused.

        Raises:
            BranchConfirmed: it was confirmed before.
            InvalidMessage: as `attempt`.
            InvalidHandler: what cancels isn't declared, or is async and the session isn't.
        """
        return _with(session, self._cancel, Branch(transaction_id, branch, body))

    # ----------------------------------------------------------------------------------------------------------------

    def _attempt(self, session: Session, carrier: Any, branch: Branch[T]) -> bool:
        key = self._key(branch)
        (new,) = execute(session.connection(), sql.try_branch(self._schema, **key))
        if new:
            self._call(BranchState.TRIED, carrier, branch)
        elif self._state(session, key) is BranchState.CANCELLED:
            raise BranchCancelled(f"{self._text(branch)} was cancelled before it was tried")
        return bool(new)

    def _confirm(self, session: Session, carrier: Any, branch: Branch[T]) -> bool:
        key = self._key(branch)
        connection, confirm = session.connection(), sql.confirm_branch(self._schema, **key)
        (changed,) = execute(connection, confirm)
        if not changed and (state := self._state(session, key)) is None:
            # Its try may be about to commit. An UPDATE doesn't see that row, and so doesn't wait; an INSERT of the same
            # key does, and the statement after it sees what came of it.
            with connection.begin_nested() as waiting:
                execute(connection, sql.try_branch(self._schema, **key))
                waiting.rollback()
            (changed,) = execute(connection, confirm)
            state = self._state(session, key)
        if changed:
            self._call(BranchState.CONFIRMED, carrier, branch)
            return True
        if state is None:
            raise BranchUnknown(f"{self._text(branch)} can't be confirmed: it was never tried")
        if state is BranchState.CANCELLED:
            raise BranchCancelled(f"{self._text(branch)} can't be confirmed: it was cancelled")
        return False

    def _cancel(self, session: Session, carrier: Any, branch: Branch[T]) -> bool:
        key = self._key(branch)
        (changed,) = execute(session.connection(), sql.cancel_branch(self._schema, **key))
        if not changed:
            if self._state(session, key) is BranchState.CONFIRMED:
                raise BranchConfirmed(f"{self._text(branch)} can't be cancelled: it was confirmed")
            return False
        ((was_tried,),) = changed
        if was_tried:
            self._call(BranchState.CANCELLED, carrier, branch)
        return bool(was_tried)

    @property
    def _schema(self) -> str:
        return self.outbox.current.settings.schema

    def _declare(self, state: BranchState, function: F) -> F:
        self._functions.add(_BranchFunction(self.name, function, state=state))
        return function

    def _call(self, state: BranchState, carrier: Any, branch: Branch[T]) -> None:
        function = self._functions.of(_BranchFunction).get(state)
        if function is None:
            raise InvalidHandler(
                f"participant {self.name!r} has nothing that is called to be {state.value}: declare all three functions"
            )
        call_with(function, branch, carrier)

    def _state(self, session: Session, key: dict[str, Any]) -> BranchState | None:
        # Only read where the call took no effect: whose effect that was has ended by now, and the row stays.
        (rows,) = execute(session.connection(), sql.branch_state(self._schema, **key))
        return BranchState(rows[0][0]) if rows else None

    def _key(self, branch: Branch[T]) -> dict[str, Any]:
        if not isinstance(branch.transaction_id, UUID) or not branch.transaction_id.int:
            kind = type(branch.transaction_id).__name__
            raise InvalidMessage(f"transaction_id must be a UUID, not {kind}: {branch.transaction_id!r}")
        named = check_text("branch", branch.branch, MAX_KEY_BYTES)
        if named is None or named.strip() != named:
            raise InvalidMessage(
                f"branch {named!r} must be a str without spaces around it; leave it out where a transaction has one"
            )
        return {"transaction_id": branch.transaction_id, "branch": named, "participant": self.name}

    def _text(self, branch: Branch[T]) -> str:
        of_branch = f", branch {branch.branch!r}," if branch.branch else ""
        return f"transaction {branch.transaction_id}{of_branch} of participant {self.name!r}"


def _with(session: Any, call: Callable[[Session, Any, Branch[T]], bool], branch: Branch[T]) -> Any:
    """Make a call with a session; with an AsyncSession, return what to await for its result."""
    # An AsyncSession has the Session inside; asking its class would import what may not be installed.
    if hasattr(session, "sync_session"):
        return session.run_sync(call, session, branch)
    return call(session, session, branch)
