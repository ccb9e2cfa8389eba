"""What can go wrong, as a tree; every message names the thing, the value and the mend.

::

    OutboxError
    ├── InvalidMessage (also ValueError)    topic, key, tag, header, body or delay that can't be stored
    ├── InvalidSettings (also ValueError)   settings that contradict each other
    ├── InvalidHandler (also ValueError)    a declaration that can't work: topic declared twice, bad policy
    ├── TransactionRequired                 no transaction that could carry the message
    ├── OutboxBusy                          the topic has more waiting than the limit that was set; try again later
    ├── SchemaError
    │   ├── SchemaMissing                   the outbox tables are not in this database
    │   ├── SchemaOutdated                  they are there, but older or newer than this code
    │   └── SchemaBusy                      they can't be changed now: somebody holds a lock on them
    ├── DecisionError
    │   ├── HalfNotFound                    no half message has this id
    │   ├── DecisionRefused                 an operator's act without a reason, or a decision that would tell of a
    │   │                                   change which was never made
    │   └── AlreadyDecided
    │       ├── AlreadyCommitted
    │       └── AlreadyRolledBack
    ├── CheckRefused                        the half can't be checked: no checker for its topic, or it's being asked
    ├── RecallRefused                       the message is out already, or was never scheduled
    ├── NotParked                           resume was asked for a message that isn't parked
    ├── MessagesPruned                      a group fell behind what the producer still keeps
    ├── ReconcileError                      a reconciliation that can't be run
    │   └── SourceError                     one of its sources can't be read
    ├── CompensationRefused                 the local transaction can't be rolled back: its message took effect, or
    │                                       nobody knows how
    └── AdminError                          what an operator asked for can't be done
        ├── InvalidRequest                  a filter, page token, selector or option that isn't one
        ├── UnknownDatabase                 no database of this name is registered
        ├── MessageNotFound                 no registered database knows this message
        ├── OperationNotFound               no registered database has this operation
        ├── ActRefused                      the message isn't in a state in which this can be done
        ├── VersionMismatch                 the message has changed since it was looked at
        ├── SelectorChanged                 what a preview showed isn't what would be acted on now
        └── OperationTooLarge               more messages than one operation may have
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID


class OutboxError(Exception):
    """Base of all errors of this package."""


class InvalidMessage(OutboxError, ValueError):
    """A message that can't be stored as asked; nothing was written."""


class InvalidSettings(OutboxError, ValueError):
    """Settings that contradict each other or are out of range."""


class InvalidHandler(OutboxError, ValueError):
    """A declaration (consumer, decorator) that can't work."""


class TransactionRequired(OutboxError):
    """There is no transaction which business change and message could share."""


class OutboxBusy(OutboxError):
    """The system can't keep up with a topic: nothing was written, try again later (RocketMQ: SYSTEM_BUSY).

    ``waiting`` of ``what`` ("undecided halves", "undispatched messages") of the topic were counted, at least ``limit``;
    counting undecided halves stops there, and of many undispatched messages the number is an estimate.
    """

    def __init__(self, topic: str, what: str, waiting: int, limit: int, setting: str) -> None:
        super().__init__(
            f"topic {topic!r} has reached its limit of {limit} {what} (setting {setting}; {waiting} counted): "
            "nothing was written; try again later, and see that a worker is running"
        )
        self.topic = topic
        self.what = what
        self.waiting = waiting
        self.limit = limit
        self.setting = setting

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.topic, self.what, self.waiting, self.limit, self.setting)


class SchemaError(OutboxError):
    """The outbox tables in the database don't fit this code."""


class SchemaMissing(SchemaError):
    """The outbox tables are not in this database."""


class SchemaOutdated(SchemaError):
    """The outbox tables are of another version than this code."""


class SchemaBusy(SchemaError):
    """The outbox tables can't be changed now: another transaction holds a lock on them."""


class DecisionError(OutboxError):
    """A half message can't be decided as asked."""


class HalfNotFound(DecisionError):
    """No half message has this id in this database."""

    def __init__(self, half_id: UUID) -> None:
        super().__init__(
            f"no half message {half_id} in this database; "
            "was it prepared in another one, or in a transaction that rolled back?"
        )
        self.half_id = half_id

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.half_id,)


class DecisionRefused(DecisionError):
    """An operator's act was refused: no reason, or it would tell the consumers of a change that was never committed."""


class AlreadyDecided(DecisionError):
    """Somebody else's decision came first; the caller's transaction must not commit.

    ``decided_by`` is ``producer``, ``check`` or ``operator``.
    """

    def __init__(self, half_id: UUID, decided_by: str) -> None:
        done = "committed" if isinstance(self, AlreadyCommitted) else "rolled back"
        super().__init__(f"half message {half_id} was already {done} (by the {decided_by})")
        self.half_id = half_id
        self.decided_by = decided_by

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.half_id, self.decided_by)


class AlreadyCommitted(AlreadyDecided):
    """The half message was committed before."""


class AlreadyRolledBack(AlreadyDecided):
    """The half message was rolled back before."""


class CheckRefused(OutboxError):
    """A half message can't be checked now: nobody could answer, or somebody is being asked already."""


class RecallRefused(OutboxError):
    """A message can't be recalled: it is out already, or was never scheduled."""


class NotParked(OutboxError):
    """A message can't be resumed, since it isn't parked in this group."""


class MessagesPruned(OutboxError):
    """A group fell behind: messages after its offset were pruned by the producer before it read them."""


class ReconcileError(OutboxError):
    """A reconciliation can't be run."""


class SourceError(ReconcileError):
    """A source of a reconciliation can't be read; the message holds no password."""


class CompensationRefused(OutboxError):
    """A local transaction can't be rolled back: its message took effect, or no compensation is registered."""


class AdminError(OutboxError):
    """What an operator asked for can't be done; nothing was changed."""


class InvalidRequest(AdminError):
    """A filter, page token, selector or option that isn't one; ``field`` names it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self.args, self.field)


class UnknownDatabase(AdminError):
    """No database of this name is registered."""

    def __init__(self, name: str, registered: Sequence[str]) -> None:
        super().__init__(f"no database {name!r} is registered; there are: {', '.join(registered)}")
        self.name = name
        self.registered = list(registered)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.registered)


class MessageNotFound(AdminError):
    """No registered database knows this message."""


class OperationNotFound(AdminError):
    """No registered database has this operation."""


class ActRefused(AdminError):
    """A message isn't in a state in which this can be done, or somebody else was faster."""


class VersionMismatch(AdminError):
    """A message has changed since it was looked at."""


class SelectorChanged(AdminError):
    """What a preview showed isn't what would be acted on now."""


class OperationTooLarge(AdminError):
    """More messages than one operation may have."""
