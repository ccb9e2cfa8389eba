"""Confirm: the producer learns what became of each message in each group that it knows, and sends again what got lost.

**The tables**, both in the producer's database and written by this duty alone:

- ``delivery_cursor`` is appended by each batch that came further. Up to its ``positions``, the fate of each message of
  a queue is known: a message without a delivery was consumed. Up to its ``starts``, none was meant for the group. A
  group that has a cursor is known to the database, and so to lists, which don't see what an application declares.
- ``delivery`` is appended where a message's first fate is another one, and each time that it is another one again. The
  newest ``number`` counts. ``settled`` says that no worker asks about it any more.

**A pass**, for each known group: ask how far the group has read; ask about deliveries not settled; then go on from the
cursor to where the group has read, as far as messages are older than the grace, and ask about these. What lies beyond
the group's offset waits for the group, and isn't sent again: the second one would only wait behind it. A message that
the group has read past and its inbox doesn't have is lost, unless the group's filter leaves it out. It is sent again by
the operators' act, and counted: a row ``unconsumed`` each time. The newest send has a grace of its own, so that several
groups that have lost the same message cost one send: a row ``unconsumed`` with a reason waits for it, and counts none.
After ``confirm_resends`` it is ``resend_exhausted``.

**The cost** is that of the messages since the last pass: one read of the queue's index and one look into the inbox for
each, an insert for one that isn't consumed, and those not settled besides. Nothing is updated or deleted, so that it
stays the same while a transaction is held open elsewhere.

**The races.** No transaction spans two databases, and none is open while a consumer is asked. So each answer is one of
the past when it is written:

- *consume, retry*: an answer that is out of date is ``failed`` or ``parked``, which aren't settled: the next pass asks
  again. ``consumed`` never changes. A group commits its offset together with its inbox row, and the offset is asked
  first: a message committed in between has a row and is found, never taken for lost.
- *park*: parked isn't settled, for an operator may retry it. `Outbox.on_undeliverable` is called once for it all the
  same, and `Outbox.on_delivered` may come after it.
- *compensate*: a quarantine is lifted again where a compensation is refused, so that it is settled only when the
  compensation is written. A resend waits for a compensation's lock, and the act refuses it after that.
- *another worker* at the same group: the number of each row is one more than that which was read. Of two workers, the
  second finds it taken, and leaves out the row, its notice and its resend. The same goes for the cursor, and there for
  the whole batch.
- *prune*: it deletes deliveries with their messages, in segments as a whole (they have the same ones) or row by row. A
  delivery is only appended while its message is there. One whose transaction is still open then slips in behind, is
  asked about for nothing, and goes when prune next looks at its segment, or at the rows around it.
- *reset, skip, fail-over, restore*: a group whose offset went back is asked about as far as it has read; the cursor
  and its ``starts`` stay, and consumed messages stay so. Those that an operator had it skip, or behind which it began
  anew, are left out, like what its filter leaves out. A producer that was restored has the cursor of the same moment as
  its messages; new positions are of a later
  epoch, and so behind it.
- *a crash*: rows, notices and cursor of a batch are one transaction.

**Callbacks** learn of a fate by a notice (`outbox.message.notice`) that is written in the transaction of its row: of
the first row of each kind (`CALLBACK_OF`) of a message and a group. Its id follows from these, so that a producer's
database that was restored tells nothing twice. A fate that was known before its callback was declared isn't told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from outbox.acts.changes import ActRequest, Target, apply
from outbox.acts.messages import ACTS
from outbox.compensate.compensation import Compensation
from outbox.consumer.subscription import filter_of
from outbox.database.duty import APPEND, PARTS, Duty, Post, Task, alone
from outbox.database.execute import by_size, execute
from outbox.database.notices import NOTICES, Notice, write_notices
from outbox.database.sql import plan_by_index, wait_at_most
from outbox.delivery import sql
from outbox.delivery.inbox_status import Inbox, InboxStatus, InboxUnavailable, QueueProgress, inbox_of
from outbox.delivery.known_group import CALLBACK_OF, CallbackKind, DeliveryCallback, KnownGroup
from outbox.delivery.parked import compensate_parked
from outbox.delivery.sql import NewDelivery
from outbox.message.ids import derived_id
from outbox.message.model import Counts, DeliveryStatus, Status
from outbox.message.notice import DELIVERED
from outbox.settings import Settings
from outbox.telemetry.events import DeliveriesConfirmed, InboxUnreachable, MessageResent, ResendExhausted
from outbox.telemetry.hooks import emit, listeners, middlewares_here
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.execute import Row, Statement

#: The actor that sends again, in the audit.
ACTOR = "confirm"
#: Why a message that the group has read past isn't sent again yet.
_SENT_AGAIN = "its newest send has yet to be read"
#: How long (seconds) a batch waits for a lock.
_PATIENCE = 10.0
_FIRST = UUID(int=0)

Callbacks = Mapping[tuple[str, CallbackKind], DeliveryCallback]


class Trouble(NamedTuple):
    """A group that couldn't be asked, in how many passes in a row, and why."""

    topic: str
    group: str
    passes: int
    error: str


@dataclass(slots=True)
class ConfirmReport:
    """What the passes of one worker came to since it started, and what the last one met; see `confirm_once`.

    ``confirmed`` deliveries became known, ``resent`` messages were sent again, ``exhausted`` aren't sent any more.
    ``unreachable`` are groups that couldn't be asked, by topic and group.
    """

    passes: int = 0
    confirmed: int = 0
    resent: int = 0
    exhausted: int = 0
    unreachable: dict[tuple[str, str], Trouble] = field(default_factory=dict)
    _met: dict[tuple[str, str], Trouble] = field(default_factory=dict)

    def unreached(self, group: KnownGroup, error: str) -> None:
        """A group couldn't be asked."""
        key = group.topic, group.group
        before = self.unreachable.get(key)
        self._met[key] = Trouble(*key, 1 if before is None else before.passes + 1, error)

    def passed(self) -> None:
        """A pass has ended."""
        self.passes += 1
        self.unreachable, self._met = self._met, {}

    def facts(self) -> dict[str, Any]:
        """Return what a worker reports, as JSON can hold it; troubles by the code of the rule that judges them."""
        counts = ("passes", "confirmed", "resent", "exhausted")
        troubles = [_storable(each) for each in self.unreachable.values()]
        return {name: getattr(self, name) for name in counts} | {"delivery.unreachable": troubles}


def _storable(trouble: Trouble) -> dict[str, Any]:
    return {name: storable(value) if isinstance(value, str) else value for name, value in trouble._asdict().items()}


def confirm_once(
    connection: Connection,
    settings: Settings,
    *,
    groups: Sequence[KnownGroup],
    callbacks: Callbacks,
    compensations: Mapping[str, Compensation] = MappingProxyType({}),
    stopping: Callable[[], bool] = lambda: False,
    report: ConfirmReport | None = None,
) -> Counts:
    """Ask what became of messages in these groups, write it down, tell callbacks, and send lost ones again.

    ``connection`` is on the producer's database and not in a transaction. Of ``callbacks`` it is read which ones there
    are. ``stopping`` is asked between batches. A group that can't be asked is logged, and left to the next pass.
    ``report`` takes down what the pass came to. Of ``compensations``, those are ordered that are for parked messages.

    Returns ``taken`` deliveries that are new, ``done``: consumed, ``failed``: unconsumed or failed, ``parked``: parked,
    or given up.
    """
    counts, report = Counts(), report or ConfirmReport()
    for group in groups:
        if stopping():
            break
        inbox = inbox_of(group, connection, settings.schema)
        try:
            confirmation = _Confirmation(connection, settings, group, inbox, callbacks, stopping, report)
            confirmation.run()
        except InboxUnavailable as unavailable:
            report.unreached(group, str(unavailable))
            emit(InboxUnreachable(group=group.group, topic=group.topic, reason=str(unavailable)))
        finally:
            inbox.close()
        counts += confirmation.counts
    for compensation in compensations.values():
        if compensation.when == "parked" and not stopping():
            compensate_parked(connection, settings, compensation)
    report.passed()
    return counts


@dataclass(frozen=True, slots=True)
class KnownFate:
    """The fate of a message as known: the newest row, all that it was so far, how often it was sent again."""

    number: int = 0
    status: str = ""
    settled: bool = False
    reason: str | None = None
    earlier: Sequence[str] = ()
    resends: int = 0


_CONSUMED = KnownFate(status=DeliveryStatus.CONSUMED, settled=True)
#: The number and the status of what needs no row: the cursor stands for it.
_PLAIN = 1, DeliveryStatus.CONSUMED.value


@dataclass(frozen=True, slots=True)
class NewestSend:
    """The newest send of a message, as the group sees it."""

    passed: bool
    grace_over: bool
    taken: bool
    compensated: bool


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of a message, as this pass finds it."""

    status: DeliveryStatus
    settled: bool
    reason: str | None = None


def fate_of(known: KnownFate, inbox: InboxStatus | None, send: NewestSend | None, resends: int) -> Fate | None:
    """Return what has become of a message; None where nothing can be said yet.

    ``send`` is there unless the inbox has the message as consumed, failed or parked; it is None also where the message
    was pruned. ``resends`` is how often a lost message is sent again.
    """
    if known.status == DeliveryStatus.CONSUMED:
        return Fate(DeliveryStatus.CONSUMED, settled=True)
    if inbox is not None:
        settled = inbox.status in {Status.CONSUMED, Status.EXPIRED} or (send is not None and send.compensated)
        # A message consumed at last may have an error of before.
        reason = inbox.reason if inbox.status.open else None
        if inbox.status is Status.EXPIRED:
            reason = "it was too old when the group came to it"
        return Fate(DeliveryStatus(inbox.status), settled, reason)
    if send is None or not send.passed or (send.taken and not send.grace_over):
        return None
    if not send.taken:
        return Fate(DeliveryStatus.LEFT_OUT, settled=True)
    if known.resends >= resends:
        return Fate(DeliveryStatus.RESEND_EXHAUSTED, settled=True, reason=f"sent again {known.resends} times")
    return Fate(DeliveryStatus.UNCONSUMED, settled=False)


class _Overtaken(Exception):
    """Another worker has come further at this group."""


class _Confirmation:
    """One pass at one group."""

    def __init__(
        self,
        connection: Connection,
        settings: Settings,
        group: KnownGroup,
        inbox: Inbox,
        callbacks: Callbacks,
        stopping: Callable[[], bool],
        report: ConfirmReport,
    ) -> None:
        self.counts = Counts()
        self._report = report
        self._connection = connection
        self._settings = settings
        self._schema = settings.schema
        self._group = group
        self._pair = {"topic": group.topic, "group": group.group}
        self._batch = ("confirm", group.topic, group.group)
        self._inbox = inbox
        self._callbacks: dict[str, DeliveryCallback] = {
            kind: each for (topic, kind), each in callbacks.items() if topic == group.topic
        }
        self._stopping = stopping
        self._progress: dict[int, QueueProgress] = {}

    def run(self) -> None:
        """Ask about deliveries not settled, then about those that the group has read since the last pass.

        Raises:
            InboxUnavailable: the inbox can't be asked now; earlier answers are written.
        """
        progress = self._inbox.progress()
        self._progress = {each.queue: each for each in progress}
        if not progress:
            return
        self._ask_again()
        try:
            go_on, more = partial(self._go_on, progress), True
            while more and not self._stopping():
                _, more = by_size(self._connection, self._batch, self._settings.confirm_batch, go_on)
        except _Overtaken:
            return  # all that is left is the other worker's

    def _ask_again(self) -> None:
        after, more = _FIRST, True

        def ask(size: int) -> tuple[int, UUID, bool]:
            unsettled = sql.unsettled(self._schema, **self._pair, after=after, limit=size)
            ids = [half_id for (half_id,) in self._read(unsettled)]
            if ids:
                self._write(self._changed(ids), None)
            return len(ids), ids[-1] if ids else after, len(ids) == size

        while more and not self._stopping():
            _, after, more = by_size(self._connection, self._batch, self._settings.confirm_batch, ask)

    def _go_on(self, progress: Sequence[QueueProgress], size: int) -> tuple[int, bool]:
        """Confirm the next messages after the cursor; return ``size`` if that many may have been there, and if so."""
        ((number, starts, before),) = self._read(sql.cursor(self._schema, **self._pair)) or [(0, [], [])]
        # A queue that it doesn't know begins where the group began.
        starts, before = ([*each, *(queue.start for queue in progress[len(before) :])] for each in (starts, before))
        limit = max(size // len(progress), 1)
        queues, until = [each.queue for each in progress], [each.position for each in progress]
        ranges = {"queues": queues, "after": before[: len(queues)], "until": until, "limit": limit}
        of_topic = {"topic": self._group.topic, "grace": self._settings.confirm_grace}
        found = self._read(sql.messages_between(self._schema, **of_topic, **ranges))
        ids, positions, more = _until_young(found, before, limit)
        if ids or not number:
            cursor = sql.move_cursor(self._schema, **self._pair, number=number + 1, starts=starts, positions=positions)
            again = [row[2] for row in found if row[4]]
            passed = sql.known_by_cursor(self._schema, ids=again, starts=starts, positions=before)
            consumed = {half_id for (half_id,) in self._read(passed)} if again else set()
            self._write(self._changed(ids, consumed, first=True), cursor)
        return size if more else 0, more

    def _changed(
        self, ids: Sequence[UUID], consumed: Collection[UUID] = (), *, first: bool = False
    ) -> list[tuple[KnownFate, NewDelivery]]:
        """Ask about messages; return what is new of them, each with the fate as known before.

        ``consumed``: known so by a cursor, if there is no row. ``first``: a message that stays without one is consumed.
        """
        rows = self._read(sql.known(self._schema, ids=list(ids), group=self._group.group))
        known = dict.fromkeys(consumed, _CONSUMED) | {id_: KnownFate(*values) for id_, *values in rows}
        unfinished = [id_ for id_ in ids if known.get(id_, KnownFate()).status != DeliveryStatus.CONSUMED]
        statuses = self._inbox.statuses(unfinished) if unfinished else {}
        unclear = [id_ for id_ in unfinished if id_ not in statuses or statuses[id_].status is Status.QUARANTINED]
        sends = self._newest_sends(unclear) if unclear else {}
        found = []
        for id_ in ids:
            before = known.get(id_, KnownFate())
            fate = fate_of(before, statuses.get(id_), sends.get(id_), self._settings.confirm_resends)
            if fate is None and first and not before.status:
                fate = Fate(DeliveryStatus.UNCONSUMED, settled=False, reason=_SENT_AGAIN)
            if fate is not None and (row := self._row(id_, before, fate)) is not None:
                found.append((before, row))
        return found

    def _newest_sends(self, ids: Sequence[UUID]) -> dict[UUID, NewestSend]:
        rows = self._read(
            sql.newest_sends(self._schema, ids=list(ids), grace=self._settings.confirm_grace, **filter_of(self._group))
        )
        sends = {}
        for id_, queue, position, grace_over, taken, compensated in rows:
            progress = self._progress.get(queue, QueueProgress(queue, 0, 0))
            meant = taken and position > progress.start and not progress.has_skipped(position)
            sends[id_] = NewestSend(position <= progress.position, grace_over, meant, compensated)
        return sends

    def _row(self, half_id: UUID, known: KnownFate, fate: Fate) -> NewDelivery | None:
        """Return the row that says a message's fate; None where nothing is new."""
        same = (known.status, known.settled, known.reason) == (fate.status, fate.settled, fate.reason)
        if same and fate.status is not DeliveryStatus.UNCONSUMED:
            return None
        return NewDelivery(half_id, known.number + 1, fate.status.value, fate.settled, fate.reason)

    # --- writing -----------------------------------------------------------------------------------------------------

    def _write(self, found: Sequence[tuple[KnownFate, NewDelivery]], cursor: Statement | None) -> None:
        """Append rows, with the notices that tell of them, and the cursor, which stands for first rows ``consumed``.

        Raises:
            _Overtaken: another worker has moved the cursor; nothing is written.
        """
        if not found and cursor is None:
            return
        with self._connection.begin():
            execute(self._connection, plan_by_index(), wait_at_most(_PATIENCE))
            if cursor is not None and not execute(self._connection, cursor)[0]:
                raise _Overtaken
            new = self._append([row for _, row in found], plain=cursor is not None)
            lost = [row.half_id for row in new if row.status == DeliveryStatus.UNCONSUMED and row.reason is None]
            resent = self._resend(lost) if lost else []
            self._notify({row.half_id: known for known, row in found}, new)
        self._tell(new, resent)

    def _notify(self, known: Mapping[UUID, KnownFate], rows: Sequence[NewDelivery]) -> None:
        """Tell callbacks of these rows: of the first of each kind."""
        notices: dict[str, list[Notice]] = {}
        for row in rows:
            kind = CALLBACK_OF.get(row.status)
            if kind in self._callbacks and kind not in map(CALLBACK_OF.get, known[row.half_id].earlier):
                facts = {"group": self._group.group, "status": row.status, "reason": row.reason}
                notice = derived_id(row.half_id, DELIVERED, self._group.group, kind)
                call = self._callbacks[kind]
                notices.setdefault(call.group, []).append(Notice(notice, row.half_id, facts | {"call": call.decorator}))
        for group, of_group in notices.items():
            execute(self._connection, write_notices(self._schema, DELIVERED, group, of_group))

    def _append(self, rows: Sequence[NewDelivery], *, plain: bool) -> list[NewDelivery]:
        """Append rows, but those that are ``plain``; return all that no other worker has appended before."""
        new = {row.half_id for row in rows if plain and (row.number, row.status) == _PLAIN}
        if others := [row for row in rows if row.half_id not in new]:
            statement = sql.append(self._schema, self._group.topic, self._group.group, others)
            new |= {half_id for (half_id,) in execute(self._connection, statement)[0]}
        return [row for row in rows if row.half_id in new]

    def _resend(self, ids: Sequence[UUID]) -> list[UUID]:
        """Send messages again, as an operator would; return which were. One that is being compensated is not."""
        why = f"group {self._group.group} has read past it, and its inbox doesn't have it"
        request = ActRequest(ACTS["resend"], ACTOR, why, {"via": "worker"})
        outcomes = apply(self._connection, self._settings, request, [Target(id_) for id_ in ids])
        return [id_ for id_, outcome in zip(ids, outcomes, strict=True) if outcome.state == "done"]

    def _tell(self, rows: Sequence[NewDelivery], resent: Sequence[UUID]) -> None:
        topic, group = self._group.topic, self._group.group
        if resent:
            emit(MessageResent(message_ids=tuple(resent), topic=topic, group=group))
        number = Counter(row.status for row in rows)
        if rows and (listeners.hooks or middlewares_here.get()):
            emit(DeliveriesConfirmed(topic=topic, group=group, numbers=dict(number)))
        self._report.confirmed += len(rows)
        self._report.resent += len(resent)
        self._report.exhausted += number[DeliveryStatus.RESEND_EXHAUSTED]
        for row in rows:
            if row.status == DeliveryStatus.RESEND_EXHAUSTED:
                emit(ResendExhausted(message_id=row.half_id, topic=topic, group=group, reason=row.reason or ""))
        self.counts += Counts(
            len(rows),
            number[DeliveryStatus.CONSUMED],
            number[DeliveryStatus.UNCONSUMED] + number[DeliveryStatus.FAILED],
            number[DeliveryStatus.PARKED] + number[DeliveryStatus.RESEND_EXHAUSTED],
        )

    def _read(self, statement: Statement) -> list[Row]:
        with self._connection.begin():
            return execute(self._connection, plan_by_index(), statement)[1]


def _until_young(found: Sequence[Row], before: list[int], limit: int) -> tuple[list[UUID], list[int], bool]:
    """Return which of the messages of each queue come before the first whose grace isn't over, and whether to go on.

    Between them are the positions of the last of each queue. A message that was sent twice is in it once.
    """
    ids: dict[UUID, None] = {}
    positions, taken, ended = list(before), [0] * len(before), set[int]()
    for queue, position, half_id, grace_over, _ in found:
        if not grace_over:
            ended.add(queue)
        if queue not in ended:
            ids[half_id] = None
            positions[queue] = position
            taken[queue] += 1
    return list(ids), positions, limit in taken


def _tasks(at: Post) -> Iterator[Task]:
    groups, report = at.outbox.groups_to_confirm(), ConfirmReport()
    if not groups or "producer" not in at.parts:
        return
    is_own = any(group.consumer is None and group.status_url is None for group in groups)
    one_pass = alone(
        confirm_once,
        replace(at.settings, confirm_grace=0.0) if at.at_once else at.settings,
        groups=groups,
        callbacks=at.outbox.functions.of(DeliveryCallback),
        compensations=at.outbox.functions.of(Compensation),
        report=report,
    )

    def wake() -> None:
        at.wake_dispatch()
        at.wake_consumers(None)

    # A lane of its own: consumers may be slow to answer.
    yield Task(
        name="confirm",
        one_pass=one_pass,
        every=at.settings.confirm_interval,
        after=wake,
        facts=report.facts,
        parts=PARTS if is_own else ("producer",),
    )


DUTIES = (
    Duty(
        "confirm",
        "Asks known groups what became of messages, and sends again what got lost.",
        f"""
        producer: worker
        {APPEND}
        {NOTICES}
        SELECT ON half_check compensation
        SELECT INSERT ON scheduled_message bulk_item delivery delivery_cursor
        UPDATE ON op_message
        SELECT INSERT UPDATE ON bulk_job
        SELECT(target action result) ON audit
        consumer: worker
        SELECT ON consumer_message consumer_offset consumer_start consumer_passage reread_message log_loss
        SELECT ON message_source
        """,
        role="confirm",
        tasks=_tasks,
    ),
)
