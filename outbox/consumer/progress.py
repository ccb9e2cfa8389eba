"""How far a group has come in a queue: one immutable value, and all that follows from it, decided without a database.

Both engines, that in transactions (`outbox.consumer.consumer`) and that outside of them
(`outbox.consumer.outside.leased_queue`), read rows, have the value say what they mean, and write what it says:

- *come to an offset* (`at`): another worker or an operator may have moved it, also back;
- *read on* (`read`): the log goes on behind the offset, was pruned there, or went back;
- *begin* (`begin`): a start that had no end tells of a crash; after too many, the next message is to blame;
- *choose* (`choice`, `batch`): which messages run, wait, are passed, or stop the queue;
- *go past* (`past`): the offset behind them, which `append` writes, and nothing else does.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from outbox.consumer import key_order, sql
from outbox.consumer.growth import UNBOUNDED, Reach
from outbox.consumer.subscription import Entry, Subscription, filter_of, known_rows, to_entry
from outbox.errors import MessagesPruned
from outbox.message.model import Status, number_of
from outbox.telemetry.events import CrashFound
from outbox.text import topic_of

if TYPE_CHECKING:
    from outbox.database.execute import Row, Statement
    from outbox.database.sql import GroupQueue
    from outbox.settings import Settings


class Choice(enum.Enum):
    """What becomes of a message that a group comes to."""

    RUN = enum.auto()
    WAIT = enum.auto()  # for an earlier one of its key
    PASS = enum.auto()  # the inbox knows it, or the group doesn't take it
    RESENT = enum.auto()  # a newer send of one that failed or is parked: it is tried again
    STOP = enum.auto()  # ordered, and it waits for its retry


class Beginning(enum.Enum):
    """What a worker does first at an offset."""

    GO_ON = enum.auto()
    START = enum.auto()  # write down that it starts
    PARK = enum.auto()  # set the next message aside: it kills its workers
    LEAVE = enum.auto()  # to the worker that may just have started


class KnownRows(NamedTuple):
    """What the inbox says: rows of `sql.known` by their ids, the keys that are held, and what is handled again."""

    known: Mapping[UUID, Row]
    held: Collection[str | None] = frozenset()
    again: Collection[UUID] = frozenset()

    @classmethod
    def of(cls, rows: Sequence[Sequence[Row]]) -> KnownRows:
        """Return it by the rows of the statements of `ConsumerProgress.inbox_of`."""
        known, *held = rows
        return cls({row[0]: row for row in known}, {key for each in held for (key,) in each})


class Batch(NamedTuple):
    """What becomes of the next messages: those ``passed`` are done with once those to ``run`` are.

    ``stop`` is what the next one said that isn't passed with them. ``is_retry``: the one to run has failed before.
    ``inline`` were handled before they had a position (`outbox.relay.intake.inline`).
    """

    run: Sequence[Entry] = ()
    wait: Sequence[Entry] = ()
    passed: Sequence[Entry] = ()
    again: Collection[UUID] = frozenset()
    stop: Choice | None = None
    is_retry: bool = False
    attempt: int = 1
    first_failed_at: dt.datetime | None = None
    inline: Sequence[Entry] = ()


class ConsumerProgress(NamedTuple):
    """How far a group has come in the queue ``of`` it: behind ``position``, which is -1 where that isn't known.

    ``message_id`` is that of the message there, as far as it is known, ``starts`` how many starts of what follows had
    no end. The group's passage of the queue, by its number, ``began`` behind a position: what an earlier one had from
    there on is handled again. ``reach`` is how far the group may read, if its topic got more queues, ``end`` the last
    position, as far as it is known. ``started`` is the position beside which this worker has written a start, -1 if
    nowhere, None if it is yet to begin; it handles the next ``one_by_one`` messages so.
    """

    of: GroupQueue
    position: int = -1
    message_id: UUID | None = None
    starts: int = 0
    passage: int = 0
    began: int = 0
    reach: Reach = UNBOUNDED
    end: int = 0
    started: int | None = None
    one_by_one: int = 0

    @property
    def topic(self) -> str:
        """The topic of the feed: by that, and by the number of the queue, the source has its log."""
        return topic_of(self.of.topic)

    @property
    def number(self) -> int:
        """The number of the queue in its topic."""
        return self.of.queue

    def at(self, row: Row) -> ConsumerProgress:
        """Return the progress at the newest offset, by its row, of `sql.offset` or of a lease's ``progress``.

        Where another passage began, `outbox.consumer.passage.begun` finds out.
        """
        position, starts, message_id, passage = row[:4]
        if (position, starts, passage, message_id) == (self.position, self.starts, self.passage, self.message_id):
            return self
        # A group that was moved back reads over no growth, until the next look at its queues.
        reach = self.reach if position >= self.reach.position else Reach(0, position, position)
        known = reach, self.end, self.started, self.one_by_one
        return ConsumerProgress(self.of, position, message_id, starts, passage, self.began, *known)

    def past(self, entry: Entry, taken: int = 1) -> ConsumerProgress:
        """Return the progress behind a message, the last of so many; with a start while a next one is suspected."""
        left = max(self.one_by_one - taken, 0)
        starts, started = (1, entry.position) if left else (0, self.started)
        known = self.passage, self.began, self.reach, self.end
        return ConsumerProgress(self.of, entry.position, entry.id, starts, *known, started, left)

    def is_behind(self, last: int, last_id: UUID | None, *, is_standby: bool) -> bool:
        """Tell whether the queue, whose log ends so, has messages for the group, or hasn't what the group has read."""
        if last == self.position:
            return self.message_id not in {None, last_id}
        # An offset that is ahead may have been moved since the queue's end was read: a step looks again.
        return self.end > self.position or (last < self.position and not is_standby)

    def append(self) -> Statement:
        """Write the offset."""
        values = *self.of.values, self.position, self.starts, self.message_id, self.passage
        return sql.append_offset(self.of.schema, *values)

    def drop_starts(self) -> Statement:
        """Forget the starts at the offset, one of which had an end: the next worker begins to count anew."""
        group, topic, queue = self.of.values
        offset = {"group": group, "topic": topic, "queue": queue, "position": self.position, "id": self.message_id}
        return sql.drop_starts(self.of.schema, **offset, passage=self.passage)

    def inbox_of(self, entries: Sequence[Entry], subscription: Subscription) -> list[Statement]:
        """Return what reads the inbox rows of messages, and which of their keys are held back; for `KnownRows.of`."""
        known = known_rows(self.of, entries)
        return [known, *key_order.held(self.of, entries)] if subscription.by_key else [known]

    def next_messages(self, subscription: Subscription, settings: Settings, limit: int) -> Statement:
        """Return the statement that reads ahead so many messages; its rows are for `read`."""
        of, size = self.of, settings.read_ahead_bytes
        values = {"position": self.position, "limit": limit, "bytes": size, "grown": self.reach.grown}
        return sql.messages_after(
            of.schema, topic=subscription.topic, queue=self.number, **values, **filter_of(subscription)
        )

    def known_after(self, subscription: Subscription, limit: int) -> Statement:
        """Return what reads the inbox rows of so many next messages, where the log is in the same database."""
        of = self.of
        return sql.known_after(of.schema, subscription.topic, self.number, self.position, limit, of.group)

    def read(self, rows: Sequence[Row], subscription: Subscription) -> list[Entry] | None:
        """Return what follows in the log, by rows of `next_messages`.

        None if the log went back: it has another message at the offset, or none and comes to no later one, or repeats a
        number.

        Raises:
            MessagesPruned: the next message is gone, and the subscription says to stop then.
        """
        position, queue = self.position, self.number
        if position and not rows:
            # What stood before a growth can't be lost: a log that knows the growth has had it.
            return None if self.reach.end is None else []
        if rows and rows[0][0] == position:
            if self.message_id not in {None, rows[0][1]}:
                return None
            rows = rows[1:]
        if not rows:
            return []
        first, last = rows[0][0], rows[-1][0]
        # Over the end of an epoch, the number goes on.
        step = 1 if first == position + 1 else number_of(first) - number_of(position)
        if step < 1:
            return None
        if step > 1 and subscription.on_pruned == "stop":
            raise MessagesPruned.unread(subscription.group, self.of.topic, queue, number_of(position), step - 1)
        end = max(self.end, last)
        return [to_entry(row, subscription, queue, end) for row in rows]

    @property
    def total(self) -> int:
        """How many starts had no end here, with that of this worker if it is yet to begin."""
        return self.starts + (self.started is None)

    def begin(self, *, runs: bool, is_new: bool, most: int) -> Beginning:
        """Return what a worker does first at the offset.

        ``runs``: the next message is one to run. ``is_new``: the newest start was written just now. ``most`` starts may
        have no end.
        """
        # A worker that has started here itself lives, and goes on: those that lost the race to it are no crash.
        if runs and self.total > most and self.started != self.position:
            # And so may live the one that wrote the newest start, between two transactions.
            return Beginning.LEAVE if is_new else Beginning.PARK
        return Beginning.START if self.started is None else Beginning.GO_ON

    def crash(self) -> CrashFound:
        """Return the event that tells of the starts here that had no end."""
        of = self.of
        return CrashFound(group=of.group, topic=of.topic, queue=self.number, position=self.position, starts=self.starts)

    def is_earlier(self, row: Row) -> bool:
        """Tell whether an earlier passage has written a row of `sql.known`, whose message this one handles again.

        By the position at which it was handled: one that was only sent again since wasn't read again.
        """
        _, status, _, _, queue, position, discarded, passage, _ = row
        is_before = passage < self.passage and queue == self.of.queue and position > self.began
        return is_before and Status(status).reread and not discarded

    def is_sent_again(self, entry: Entry, row: Row) -> bool:
        """Tell whether this is a newer send of a message that the group has failed or parked, by its row."""
        if entry.message is None or entry.message.send_number == 1:
            return False
        _, status, _, _, queue, position, discarded, *_ = row
        tries = status == Status.FAILED or (status == Status.PARKED and not discarded)
        return tries and (queue, position) != (self.of.queue, entry.position)

    def choice(self, entry: Entry, row: Row, held: Collection[str | None], *, ordered: bool) -> Choice:
        """Return what becomes of a message by its row and the keys held; ``ordered``: a failed one keeps its queue."""
        if row is sql.NO_ROW:
            if entry.message is None:
                return Choice.PASS
            return Choice.WAIT if held and entry.key in held else Choice.RUN
        if self.is_sent_again(entry, row):
            return Choice.RESENT
        if ordered and row[1] == Status.FAILED:
            return Choice.STOP if row[3] > 0 else Choice.RUN
        return Choice.PASS

    def batch(self, entries: Sequence[Entry], inbox: KnownRows, *, ordered: bool) -> Batch:
        """Return what becomes of the next messages, up to one that stops them; a retry is a batch of its own."""
        # By the numbers of their ids: the hash of a UUID is a call of Python's. A message that was resent may stand in
        # the batch twice.
        run: dict[int, Entry] = {}
        wait: dict[int, Entry] = {}
        passed: list[Entry] = []
        if not inbox.known and not inbox.held:  # as mostly
            for entry in entries:
                if entry.message is not None:
                    run.setdefault(entry.id.int, entry)
            return Batch(list(run.values()), (), entries, inbox.again)
        stop, retried = None, sql.NO_ROW
        for entry in entries:
            row = inbox.known.get(entry.id, sql.NO_ROW) if inbox.known else sql.NO_ROW
            choice = self.choice(entry, row, inbox.held, ordered=ordered)
            is_retry = choice is Choice.RUN and row is not sql.NO_ROW
            if choice is Choice.RESENT or choice is Choice.STOP or (is_retry and passed):
                stop = choice
                break
            if choice is not Choice.PASS:
                (run if choice is Choice.RUN else wait).setdefault(entry.id.int, entry)
            passed.append(entry)
            if is_retry:
                retried = row
                break
        how = retried is not sql.NO_ROW, retried[2] + 1, retried[8]
        inline = [each for each in passed if inbox.known.get(each.id, sql.NO_ROW)[5] == 0]
        return Batch(list(run.values()), list(wait.values()), passed, inbox.again, stop, *how, inline)

    def resend(self, entry: Entry) -> Statement:
        """Have a message tried again that was sent again. Rows: none if its row is held: not to be passed then."""
        of = self.of
        return sql.retry_resent(of.schema, group=of.group, queue=of.queue, id=entry.id, position=entry.position)
