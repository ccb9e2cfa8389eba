"""Define the data that an operator's calls take and return: filters, rows and views.

Each is declared here once. The console's queries, forms and JSON, and the command's options are read into the filters
(`outbox.reader`); HTTP endpoints and ``-o json`` show the rows and views as they are. The ``columns`` of a row are
those of a command's table, as `outbox.cli.output.rows_table` reads them.
"""

from __future__ import annotations

import datetime as dt
import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar
from uuid import UUID

from outbox.acts.changes import LONGEST, MessageStatus, Target
from outbox.message.model import Status
from outbox.operator.look.redactor import Body
from outbox.reader import Seconds, option

T = TypeVar("T")

#: Where a count ends; from there on it means "at least".
COUNT_LIMIT = 10_000
#: Pages have numbers as far as these rows go; beyond them a list goes on by tokens.
NUMBERED_ROWS = 10_000
#: A preview of a bulk job looks at so many messages, and says "more than" beyond.
PREVIEWED = 2_000
#: The most messages that can be named one by one.
MAX_IDS = 1_000
MAX_PAGE = 500
_CENTURY = 100 * 366 * 86400.0


@dataclass(frozen=True, slots=True)
class Total:
    """How many there are: ``value`` exactly (``eq``), or at least (``gte``)."""

    value: int
    relation: Literal["eq", "gte"] = "eq"


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which page of a list: after the ``token`` of the page before; ``size`` 1 to 500.

    Or by its ``number``, from 1 on, as far as `NUMBERED_ROWS` go: the rows before it are read for that, so that going
    on by the token costs less, and no row that comes meanwhile moves the pages.
    """

    size: int = 50
    token: str | None = None
    number: int = 1


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a list.

    ``next_page_token`` is None at the end. ``complete`` is False where the search stopped at its limit before the page
    was full: going on may find more. ``total`` is None where it isn't known cheaply. ``unreached`` are databases that
    couldn't be read: what fits in them is missing, and going on tries them again.
    """

    items: list[T]
    next_page_token: str | None = None
    total: Total | None = None
    complete: bool = True
    searched: int | None = None
    unreached: list[str] = field(default_factory=list)


# --- messages of producers -------------------------------------------------------------------------------


class MessageFate(enum.StrEnum):
    """What became of a committed message in the groups that its producer knows (`Outbox.known_group`).

    ``consumed``: by all of them. ``unconsumed``: at least one has yet to read it, or has lost it; so is a message that
    was committed and isn't dispatched yet, or is scheduled. ``failed``,
    ``parked``, ``expired``, ``resend_exhausted``: so it is in at least one. ``compensated``: its local transaction was
    undone.
    """

    CONSUMED = "consumed"
    UNCONSUMED = "unconsumed"
    FAILED = "failed"
    PARKED = "parked"
    EXPIRED = "expired"
    RESEND_EXHAUSTED = "resend_exhausted"
    COMPENSATED = "compensated"


def _text(help: str, **more: Any) -> Any:  # noqa: A002 - named as the option of a field is
    return option(None, help, most=LONGEST, **more)


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Select messages of the producers; a field left out fits all. ``since`` and ``until`` go by ``born_at``.

    ``group`` goes with the status ``unconsumed`` alone, and asks the group's inbox: for messages that will come into
    its queues, those that stand in them after its offsets, and those that it has failed and will retry. Without it,
    the fates are those that the producer has learnt.
    """

    database: str | None = _text("Only of this database.", metavar="NAME")
    status: tuple[MessageStatus | MessageFate, ...] = option(
        (), "Only messages that have come so far; may be given again."
    )
    topic: str | None = _text("Only this topic.")
    key: str | None = _text("Only this key.")
    tag: str | None = _text("Only this tag.")
    producer_group: str | None = _text("Only of this producer group.", metavar="NAME")
    group: str | None = _text("With status unconsumed: what this group hasn't consumed yet.", metavar="NAME")
    sends: int | None = option(None, "Only messages that were sent at least so often.", least=1, most=2**15 - 1)
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    header: tuple[str, str] | None = option(None, "Only with this header.", metavar="NAME=TEXT")
    body: tuple[str, str] | None = option(
        None, "Only with this in the body, such as order.id=42.", metavar="PATH=TEXT", aliases=("where",)
    )


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in a list."""

    columns: ClassVar[str] = "id topic key tag status born_at deliver_at decided_by"
    database: str
    id: UUID
    topic: str
    key: str | None
    tag: str | None
    status: str
    born_at: dt.datetime
    deliver_at: dt.datetime | None
    decided_by: str | None
    decided_at: dt.datetime | None


@dataclass(frozen=True, slots=True)
class ScheduledFilter:
    """Which scheduled messages."""

    database: str | None = _text("Only of this database.", metavar="NAME")
    topic: str | None = _text("Only this topic.")
    recalled: bool = option(False, "Those that were recalled, instead.")


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A message that waits for its time, or was recalled.

    One that is ``held`` goes out when its topic is resumed, whose dispatch is paused; ``deliver_at`` says nothing then.
    """

    columns: ClassVar[str] = "id topic key deliver_at recalled_at recalled_by"
    database: str
    id: UUID
    topic: str
    key: str | None
    deliver_at: dt.datetime
    recalled_at: dt.datetime | None
    recalled_by: str | None
    held: bool


class HalfStatus(enum.StrEnum):
    """The check of an undecided half: not due for the first time, due, asked and due again later, or given up."""

    IMMUNE = "immune"
    ORPHAN = "orphan"
    WAITING = "waiting"
    PARKED = "parked"


@dataclass(frozen=True, slots=True)
class HalfFilter:
    """Which undecided halves."""

    database: str | None = _text("Only of this database.", metavar="NAME")
    topic: str | None = _text("Only this topic.")
    status: HalfStatus | None = option(None, "Only halves of this status.")
    min_age: Seconds | None = option(
        None, "Not younger: 90s, 15m, 2h, 3d.", metavar="TIME", most=_CENTURY, aliases=("older_than",)
    )


@dataclass(frozen=True, slots=True)
class HalfRow:
    """An undecided half in a list; ``age`` is in seconds.

    ``key``, ``born_at`` and ``age`` are None where the half message is gone. ``last_answer`` and ``last_error`` (its
    first line) are None while it is ``being_asked``, which can't be told from a worker that died over it until its
    lease runs out.
    """

    columns: ClassVar[str] = (
        "id topic key status age> fenced checks> last_answer last_error next_check parked_at reason"
    )
    database: str
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
    parked_at: dt.datetime | None
    reason: str | None


# --- messages in inboxes ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InboxFilter:
    """Select rows of the inboxes; a field left out fits all. ``discarded`` picks among the parked ones."""

    database: str | None = _text("Only of this database.", metavar="NAME")
    status: tuple[Status, ...] = option((), "Only rows of this status; may be given again.")
    group: str | None = _text("Only this group.", metavar="NAME")
    topic: str | None = _text("Only this topic.")
    message_id: UUID | None = option(None, "Only this message.", metavar="ID", aliases=("message",))
    fingerprint: str | None = _text("Only of this group of dead letters.", metavar="TEXT")
    error: str | None = _text("Only where the last error has this in it.", metavar="TEXT")
    attempts_gte: int | None = option(
        None, "Only after so many attempts or more.", least=0, most=2**31 - 1, metavar="N", aliases=("attempts",)
    )
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    discarded: bool | None = option(None, "Only discarded ones, or only those that aren't.")


@dataclass(frozen=True, slots=True)
class InboxRow:
    """A message in the inbox of a group; ``last_error`` is its first line in lists, all of it in `MessageView`.

    Beside the statuses of a row, ``status`` may be ``unconsumed`` (the group hasn't come so far) or ``left_out`` (it
    has, and there is no row: its filter left the message out, or the row was pruned). ``waits_for`` is the message
    that holds back the key of this one in a group that is ordered by key, ``taken_by`` the client that has taken it.
    """

    columns: ClassVar[str] = (
        "group id=message_id topic status attempts> next_attempt=next_attempt_at error=error_kind "
        "last_error waits_for taken_by changed=changed_at"
    )
    database: str
    group: str
    message_id: UUID
    topic: str
    queue: int | None
    position: int | None
    status: str
    attempts: int | None
    next_attempt_at: dt.datetime | None
    error_kind: str | None
    last_error: str | None
    received_at: dt.datetime | None
    changed_at: dt.datetime | None
    discarded_at: dt.datetime | None = None
    quarantined_by: UUID | None = None
    waits_for: UUID | None = None
    taken_by: str | None = None


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt of a group at a message that failed; the newest 20 of each are kept.

    ``attempt`` counts from 1 again where an operator retried a parked message. ``status`` is what became of the message
    by it: ``failed``, ``parked``, or ``consumed`` where the handler returned `Skip`. ``seconds`` is how long it took;
    None where the worker died over it. ``error`` is cut to its first 2,000 characters.
    """

    database: str
    group: str
    failed_at: dt.datetime
    attempt: int
    status: str
    worker: str
    seconds: float | None
    error_kind: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class FateSince:
    """What became of a message since an act: in a ``group``, or (None) at its producer.

    ``status`` is that of the inbox row or of the message; ``pending`` while no worker has tried it since, and
    ``unconsumed`` where the group has no row of it. ``at`` is when the inbox row changed last. ``error`` is the first
    line.
    """

    database: str
    group: str | None
    status: str
    at: dt.datetime | None
    error_kind: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ActFates:
    """A retry or a resend of a message, and what became of the message since."""

    action: str
    actor: str
    acted_at: dt.datetime
    fates: list[FateSince]


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Parked messages of one group and topic with one kind of error.

    ``trend`` is how many were parked in each of the last 24 hours, the oldest hour first, whatever became of them since
    (counted over the newest attempts). ``note`` and ``owner`` are an operator's last entry about them.
    """

    columns: ClassVar[str] = (
        "fingerprint group topic error=error_kind count> day> first=first_at last=last_at owner note last_error"
    )
    fingerprint: str
    database: str
    group: str
    topic: str
    error_kind: str
    count: Total
    first_at: dt.datetime | None
    last_at: dt.datetime | None
    sample: InboxRow
    trend: list[int] = field(default_factory=list)
    note: str | None = None
    owner: str | None = None
    noted_by: str | None = None
    noted_at: dt.datetime | None = None


# --- bulk jobs and the audit -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which audited acts."""

    database: str | None = _text("Only of this database.", metavar="NAME")
    actor: str | None = _text("Only what this operator did.", metavar="NAME", aliases=("by",))
    action: str | None = _text("Only this action, such as resend, retry, rollback.", metavar="NAME")
    target: str | None = _text("Only acts on this target: a message, GROUP/ID, a bulk job.", metavar="ID")
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    summed: bool = option(False, "Of bulk jobs their order and their end with its counts, not each message.")


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Hold one record of the audit: actor, act, target, reason, result and interface."""

    columns: ClassVar[str] = "when=acted_at by=actor did=action to=target why=reason result from"
    database: str
    id: int
    acted_at: dt.datetime
    actor: str
    action: str
    target: str
    reason: str | None
    result: Any
    origin: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Selector:
    """Select the targets of a bulk job: by name, or all that a filter matches. Exactly one of them is given."""

    targets: tuple[Target, ...] | None = None
    messages: MessageFilter | None = None
    inbox: InboxFilter | None = None
    halves: HalfFilter | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """Tell what a bulk job would do. Its order gives ``token`` back, which binds selector, act and count.

    Where more than `PREVIEWED` messages are matched, it isn't known how many: ``matched`` is at least that, the other
    numbers are of those that were looked at, and the token binds the messages of that moment.
    """

    action: str
    database: str
    matched: Total
    eligible: int
    ineligible: dict[str, int]
    sample: list[Target]
    described: str
    token: str

    @property
    def reach(self) -> int:
        """How many messages it may touch, as far as they were counted."""
        return self.matched.value if self.matched.relation == "gte" else self.eligible


class BulkJobState(enum.StrEnum):
    """How far a bulk job has come."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    PARTLY = "partly"
    CANCELLED = "cancelled"


class BulkItemState(enum.StrEnum):
    """How far an item of a bulk job has come."""

    PENDING = "pending"
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class BulkJobFilter:
    """Which bulk jobs."""

    database: str | None = _text("Only of this database.", metavar="NAME")
    state: BulkJobState | None = option(None, "Only bulk jobs of this state.")


@dataclass(frozen=True, slots=True)
class BulkJob:
    """A bulk job; it is done ``partly`` if some of it failed or was skipped."""

    columns: ClassVar[str] = (
        "id act=action state done> of>=total skipped> failed> by=requested_by reason ordered=created_at what=described"
    )
    database: str
    id: UUID
    action: str
    state: str
    requested_by: str
    reason: str
    described: str
    options: dict[str, Any]
    rate: float | None
    total: int
    done: int
    skipped: int
    failed: int
    cancelled: int
    pending: int
    created_at: dt.datetime
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    cancelled_at: dt.datetime | None
    cancelled_by: str | None


@dataclass(frozen=True, slots=True)
class BulkItem:
    """One item of a bulk job, and what came of the act; where it is done, ``fates`` is what became of it since."""

    columns: ClassVar[str] = "number> message state attempts> changed=changed_at outcome since_then"
    number: int
    action: str
    message_id: UUID
    topic: str | None
    group: str | None
    state: str
    outcome: str | None
    attempts: int
    changed_at: dt.datetime
    fates: list[FateSince] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BulkOutcome:
    """What became of the messages of a bulk job since.

    ``items`` are those that were done, as far as they are counted. ``counts`` has in how many groups (or, where the act
    was one at the producer, how many messages) it is so by now, by the status of a `FateSince`. ``errors`` are the
    kinds of errors of those that failed or are parked, the most frequent first, and there are ``more_kinds``.
    ``unreached`` are databases that couldn't be read: what became of messages in them isn't counted.
    """

    items: Total
    counts: dict[str, int]
    errors: dict[str, int]
    unreached: list[str]
    more_kinds: int

    def verdict_of(self, job: BulkJob) -> str:
        """Return how a bulk job is to be taken: its state, or what became of its messages once it was done."""
        if job.finished_at is None or job.cancelled_at is not None:
            return job.state
        if self.errors:
            return "unhealed"
        return "unsettled" if {"pending", MessageFate.UNCONSUMED} & self.counts.keys() else job.state


@dataclass(frozen=True, slots=True)
class BulkItemFilter:
    """Which items of a bulk job."""

    state: BulkItemState | None = option(None, "Only items of this state.")


# --- one message -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """Hold one step of a message, for its timeline: the event, its time, its database and its actor."""

    at: dt.datetime
    kind: str
    title: str
    database: str
    detail: str | None = None
    actor: str | None = None


@dataclass(slots=True, kw_only=True)
class MessageRecord:
    """Hold all rows of one message in the tables of the registered databases.

    ``check`` is the check of an undecided half, ``history`` has an entry for each time that it was asked about, whose
    ``state`` is ``answered``, ``being_asked``, or ``no_answer``: the worker died over it, or was cut off.
    ``raised`` is what its ``@two_phase`` function raised: ``error_kind``, ``error`` (with the end of its traceback) and
    ``raised_at``. ``deliveries`` are what its producer has learnt of its fate in the groups that it knows, ``attempts``
    those that failed in groups; both in order of time.
    """

    id: UUID
    half: dict[str, Any] | None = None
    check: dict[str, Any] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    raised: dict[str, Any] | None = None
    op: dict[str, Any] | None = None
    sends: list[dict[str, Any]] = field(default_factory=list)
    deliveries: list[dict[str, Any]] = field(default_factory=list)
    scheduled: dict[str, Any] | None = None
    compensation: dict[str, Any] | None = None
    inbox: list[InboxRow] = field(default_factory=list)
    attempts: list[FailedAttempt] = field(default_factory=list)
    audit: list[AuditRow] = field(default_factory=list)
    bulk_jobs: list[BulkJob] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class MessageView(MessageRecord):
    """All that the registered databases know of one message, and what follows from it.

    ``status`` is that of the producer's side, None where only an inbox knows it. ``next`` says in a sentence what
    happens next. ``version`` changes when anything about it does. ``actions`` maps the acts that can be done now to the
    groups for which they can be done (none on the producer's side); ``refused`` maps the others to the reason.
    ``outcomes`` says of the last retries and resends what became of the message since. ``copy_of`` is the message that
    an operator edited and sent again as this one, ``copies`` are those of this one.
    ``unseen`` are the databases that couldn't be read: their rows are missing.
    """

    database: str | None
    status: str | None
    next: str
    version: str
    timeline: list[Event]
    body: Body | None
    actions: dict[str, list[str]]
    refused: dict[str, str]
    outcomes: list[ActFates]
    copy_of: UUID | None
    copies: list[UUID]
    unseen: list[str]


# --- a conversation --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Receipt:
    """Tell what a group did with a message of a conversation; ``error`` is the first line of its last one."""

    database: str
    group: str
    status: str
    attempts: int
    error: str | None
    changed_at: dt.datetime


@dataclass(frozen=True, slots=True)
class ConversationMessage:
    """A message of a conversation.

    ``cause`` is the message whose handler sent it, None of the first; ``depth`` how many messages there are between the
    two that are known. ``sender`` is the group whose handler sent it, else its producer group. ``answers`` is the
    message that it answers. ``compensated_by`` is the function that undid its local transaction.
    """

    database: str
    id: UUID
    cause: UUID | None
    answers: UUID | None
    depth: int
    sender: str
    topic: str
    key: str | None
    tag: str | None
    status: str
    born_at: dt.datetime
    deliver_at: dt.datetime | None
    receipts: list[Receipt]
    compensated_at: dt.datetime | None
    compensated_by: str | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """The chain of messages that began with one, in the order in which they were sent; a cause before its effects.

    ``complete`` is False where there are more messages than are shown. ``unseen`` are the databases that couldn't be
    read: their messages are missing.
    """

    id: UUID
    messages: list[ConversationMessage]
    complete: bool
    unseen: list[str]
