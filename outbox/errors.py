"""What can go wrong, as a tree. Every message names the thing, the value and the mend; every class has a kind.

Exit code and HTTP status follow from the kind (`outbox.cli.output`, `outbox.console.problems`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import ClassVar, Self
from uuid import UUID

#: The name of this package in the index. ``outbox``, the name that is imported, is another project there.
DISTRIBUTION = "outbox-postgres"


#: Where texts have secrets: between user and host of a URL (up to its last @, since a password may have one, too; where
#: it was cut before that, to the end; a user may have one where no port follows), among options, in strings and dicts;
#: and what those that take the first @ have masked, or call a host.
_SECRETS = (
    re.compile(r"""(://[^\s:/@'"]*:)(?!\*\*\*)(?:(?:(?!://).)*(?=@)|(?!\d+(?:[/?,'"]|:?(?:\s|$)))[^\s'"]+)"""),
    re.compile(r"""(://[^\s:/'"]*@[^\s:/'"]*:)(?!\*\*\*@|\d+(?:[/?,\s'"]|$))(?:(?!://).)*(?=@)"""),
    re.compile(r"""(://[^\s:/'"]*:)\*\*\*@(?:(?!://)[^\s?])*(?=@)"""),
    re.compile(r"""(\bhost(?: name)? ['"])(?!\*\*\*@)[^'"]*(?=@)"""),
    re.compile(r"""((?:pg|ssl)?password\s*=\s*)(?!\*\*\*)(?:'(?:[^'\\]|\\.)*'|[^\s&]+)""", re.IGNORECASE),
    re.compile(r"""(['"](?:ssl)?password['"]\s*:\s*)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.IGNORECASE),
)


def without_secrets(text: str) -> str:
    """Return a text, such as one that repeats a value of the user's, without the passwords of URLs and connections."""
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text


def pip_install(*extras: str) -> str:
    """Return the command that installs this package with some of its extras, for a message that needs them."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'" if extras else f"pip install --upgrade {DISTRIBUTION}"


def was_interrupted(error: BaseException | None) -> bool:
    """Tell whether an error stands for a Ctrl-C: that closes the connection in use, and cleaning up fails by it."""
    left, ids = [error], set[int]()
    while left:
        each = left.pop()
        if isinstance(each, KeyboardInterrupt):
            return True
        if each is not None and id(each) not in ids:  # errors may be behind each other
            ids.add(id(each))
            left += [each.__cause__, each.__context__]
    return False


class ErrorKind(enum.StrEnum):
    """What an error means to a caller that doesn't know its class."""

    USAGE = "usage"  # an argument, filter or option that isn't valid
    SETTINGS = "settings"  # settings or declarations that can't work
    SCHEMA = "schema"  # the outbox tables are missing, or of another version
    NOT_FOUND = "not_found"
    REFUSED = "refused"  # may not be done like this, such as without a reason
    CONFLICT = "conflict"  # the state doesn't allow it, or another actor was first
    STALE = "stale"  # it has changed since the caller read it
    TOO_LARGE = "too_large"
    BUSY = "busy"  # try again later
    READ_ONLY = "read_only"
    UNAVAILABLE = "unavailable"  # a database or server can't be reached
    TIMEOUT = "timeout"  # the database stopped a statement that took too long
    NO_RESULT = "no_result"  # a reconciliation came to no result
    INTERNAL = "internal"  # a mistake in a program; its traceback is the best message


class OutboxError(Exception):
    """Base of all errors of this package. Their texts repeat values, but no password: that is taken out here."""

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL

    def __init__(self, *texts: object) -> None:
        super().__init__(*(without_secrets(text) if isinstance(text, str) else text for text in texts))

    def __reduce__(self) -> tuple[object, ...]:
        # By message and attributes: some constructors take other arguments.
        return Exception.__new__, (type(self), *self.args), self.__dict__


class InvalidMessage(OutboxError, ValueError):
    """A message that can't be stored; nothing was written."""

    kind = ErrorKind.USAGE


class InvalidSettings(OutboxError, ValueError):
    """Settings that contradict each other or are out of range."""

    kind = ErrorKind.SETTINGS


class InvalidHandler(OutboxError, ValueError):
    """A declaration (consumer, decorator) that can't work."""

    kind = ErrorKind.SETTINGS


class InvalidRequest(OutboxError):
    """A filter, page token, selector or option that isn't one; ``field`` names it."""

    kind = ErrorKind.USAGE

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BadExpression(OutboxError, ValueError):
    """A filter that isn't SQL92 as RocketMQ has it; ``position`` is that of the character, from 1."""

    kind = ErrorKind.USAGE

    def __init__(self, text: str, position: int, mend: str) -> None:
        near = text[position - 1 : position + 39]
        super().__init__(f"the filter is wrong at character {position}, {near!r}: {mend}")
        self.position = position


class UnknownDatabase(InvalidRequest):
    """No database of this name is registered."""

    def __init__(self, name: str, registered: Sequence[str]) -> None:
        super().__init__(f"no database {name!r} is registered; there are: {', '.join(registered)}", "database")
        self.name = name
        self.registered: list[str] = list(registered)


class NotBound(OutboxError):
    """The Outbox was made without a database, and `Outbox.bind` has not been called."""

    kind = ErrorKind.SETTINGS


class VersionUnknown(OutboxError):
    """A message of a version of its topic's model that this code can't read; a newer release can."""

    kind = ErrorKind.SETTINGS


class TransactionRequired(OutboxError):
    """There is no transaction which business change and message could share."""


class OutboxBusy(OutboxError):
    """The system can't keep up with a topic: nothing was written, try again later (RocketMQ: SYSTEM_BUSY).

    ``waiting`` of ``what`` ("undecided halves", "undispatched messages") of the topic were counted, at least ``limit``;
    counting undecided halves stops there, and of many undispatched messages the number is an estimate.
    """

    kind = ErrorKind.BUSY

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


class DuplicateMessage(OutboxError):
    """A topic has a message of the same business string already, ``message_id``: nothing was written."""

    kind = ErrorKind.CONFLICT

    def __init__(self, topic: str, dedupe: str, message_id: UUID) -> None:
        super().__init__(
            f"topic {topic!r} has the message {message_id} of {dedupe!r} already (on_duplicate='error'): roll back; "
            "with on_duplicate='ignore' a second send would do nothing"
        )
        self.topic = topic
        self.dedupe = dedupe
        self.message_id = message_id


class SchemaError(OutboxError):
    """The outbox tables in the database don't fit this code."""

    kind = ErrorKind.SCHEMA


class SchemaMissing(SchemaError):
    """The outbox tables are not in this database."""


class SchemaOutdated(SchemaError):
    """The outbox tables are of another version than this code."""


class SchemaBusy(SchemaError):
    """The outbox tables can't be changed now: another transaction holds a lock on them."""

    kind = ErrorKind.BUSY


class SequenceBehind(SchemaError):
    """A sequence is behind the table that it numbers, since logical replication doesn't carry it: dispatch stops."""

    def __init__(self, sequence: str, value: int, highest: int) -> None:
        super().__init__(
            f"{sequence} is at {value}, behind the rows that it numbers, of which the highest is {highest}: a "
            f"switch-over by logical replication doesn't carry sequences; run: SELECT setval('{sequence}', {highest})"
        )


class PrivilegeMissing(SchemaError):
    """The role of a connection may not do what it is there for, or not see the messages of its topics."""


class HalvesHidden(SchemaError):
    """Row security hides committed half messages from the role that dispatches: dispatch stops, and loses none."""

    def __init__(self, schema: str, count: int, half_id: UUID) -> None:
        super().__init__(
            f"row security hides {count} committed half messages, such as {half_id}, from this role: "
            f"dispatch stops at them; let it see all rows of {schema}.half_message (a policy, or BYPASSRLS)"
        )
        self.half_id = half_id


class NotFound(OutboxError):
    """No registered database has it: a message, group, topic, bulk job, run, saga's flow, or group of dead letters."""

    kind = ErrorKind.NOT_FOUND


class DatabaseUnreached(OutboxError):
    """Registered databases can't be read at the moment, and without them the answer isn't whole.

    ``names`` are what they are registered as.
    """

    kind = ErrorKind.UNAVAILABLE

    def __init__(self, names: Sequence[str]) -> None:
        what = f"databases {', '.join(names)} can't be reached" if len(names) > 1 else f"{names[0]} can't be reached"
        super().__init__(f"{what}, and may have more; try again when it is back, or name one that can be")
        self.names: list[str] = list(names)


class BulkJobTooLarge(OutboxError):
    """More messages than one bulk job may have."""

    kind = ErrorKind.TOO_LARGE


class LeaseEnded(OutboxError):
    """A message can't be settled any more by the one that has taken it: its lease has ended."""

    kind = ErrorKind.CONFLICT


class DecisionError(OutboxError):
    """A half message can't be decided like this."""

    kind = ErrorKind.CONFLICT


class HalfNotFound(DecisionError):
    """No half message has this id in this database."""

    kind = ErrorKind.NOT_FOUND

    def __init__(self, half_id: UUID) -> None:
        super().__init__(
            f"no half message {half_id} in this database; "
            "was it prepared in another one, or in a transaction that rolled back?"
        )
        self.half_id = half_id


class AlreadyDecided(DecisionError):
    """Another decision came first; the caller's transaction must not commit.

    ``decided_by`` is ``producer``, ``check`` or ``operator``.
    """

    def __init__(self, half_id: UUID, decided_by: str) -> None:
        done = "committed" if isinstance(self, AlreadyCommitted) else "rolled back"
        super().__init__(f"half message {half_id} was already {done} (by the {decided_by})")
        self.half_id = half_id
        self.decided_by = decided_by


class AlreadyCommitted(AlreadyDecided):
    """The half message was committed before."""


class AlreadyRolledBack(AlreadyDecided):
    """The half message was rolled back before."""


class BranchCancelled(OutboxError):
    """A branch of a transaction (try, confirm, cancel) was cancelled before."""

    kind = ErrorKind.CONFLICT


class BranchConfirmed(OutboxError):
    """A branch of a transaction (try, confirm, cancel) was confirmed before."""

    kind = ErrorKind.CONFLICT


class BranchUnknown(OutboxError):
    """A branch of a transaction (try, confirm, cancel) was never tried."""

    kind = ErrorKind.NOT_FOUND


class ActRefused(OutboxError):
    """A message isn't in a state in which this can be done, or another actor was first."""

    kind = ErrorKind.CONFLICT


class CheckRefused(ActRefused):
    """A half message can't be checked now: its topic has no checker here, or a checker is being asked already."""


class CompensationRefused(ActRefused):
    """A message can't be compensated: it took effect, or no compensation is registered."""


class VersionMismatch(OutboxError):
    """A message has changed since the operator read it."""

    kind = ErrorKind.STALE


class SelectorChanged(OutboxError):
    """What a preview showed isn't what would be acted on now."""

    kind = ErrorKind.CONFLICT


class MessagesPruned(OutboxError):
    """A group fell behind: messages after its offset were pruned by the producer before it read them."""

    @classmethod
    def unread(cls, group: str, topic: str, queue: int, number: int, count: int) -> Self:
        """Return the error of a group that had yet to read so many messages of a queue, after the one of a number."""
        return cls(
            f"group {group!r} fell behind: of topic {topic!r}, queue {queue}, the messages {number + 1} to "
            f"{number + count} were pruned before they were read; find out what they were (the producer's retention is "
            "too short for this group), then go on with on_pruned='skip'"
        )


class ReconcileError(OutboxError):
    """A reconciliation can't be run."""

    kind = ErrorKind.NO_RESULT


class SourceError(ReconcileError):
    """A source of a reconciliation can't be read; the message holds no password."""

    kind = ErrorKind.UNAVAILABLE


class SourceLost(SourceError):
    """A source of a reconciliation is out of reach, or a connection or a snapshot is lost: it may be read again."""


class JavaNotFound(ReconcileError):
    """No Java that Spark supports."""


class EmbeddedError(OutboxError):
    """The embedded PostgreSQL can't carry out a request; the message ends with the tail of its log, if any."""

    kind = ErrorKind.UNAVAILABLE


class PostgresNotFound(EmbeddedError):
    """There are no PostgreSQL programs on this machine."""
