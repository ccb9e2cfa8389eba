"""A group's progress as a value against a simple model, without a database: reading, starting, choosing."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outbox.consumer import sql
from outbox.consumer.growth import UNBOUNDED, Growth, Reach, reach
from outbox.consumer.progress import Beginning, Choice, ConsumerProgress, KnownRows
from outbox.consumer.subscription import Entry, Subscription
from outbox.database.execute import Row
from outbox.database.sql import GroupQueue
from outbox.errors import MessagesPruned
from outbox.message.model import NUMBER_BITS, Status, number_of
from tests.kit import tries

OF = GroupQueue("outbox", "g", "t", 3)
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
MOST_STARTS = 3
WORKERS = 5


def subscription(**options: Any) -> Subscription:
    """Return a group's subscription."""
    return Subscription("t", lambda message, session: None, group="g", retry_delays=(1.0,), **options)


@dataclass
class Sent:
    """A message in the log."""

    position: int
    id: UUID
    send: int = 1
    key: str | None = None
    matches: bool = True

    @property
    def row(self) -> Row:
        """The row that a worker reads."""
        known = self.position, self.id, self.send, NOW, self.key, None, None, "application/json", b"1", NOW
        return *known, self.matches


class Log:
    """A queue's log, which is pruned, and goes back; a group that has read it up to a message."""

    def __init__(self) -> None:
        self.messages: list[Sent] = []
        self.epoch = self.number = self.pruned = 0
        self.ids = 0

    def send(self, count: int) -> None:
        """Append messages, in the epoch that there is."""
        for _ in range(count):
            self.ids, self.number = self.ids + 1, self.number + 1
            self.messages.append(Sent(self.epoch << NUMBER_BITS | self.number, UUID(int=self.ids)))

    def prune(self, count: int) -> None:
        """Drop the first messages; the last one is never pruned."""
        del self.messages[: min(count, len(self.messages) - 1)]

    def lose(self, count: int, *, is_noticed: bool) -> None:
        """Forget the last messages; where dispatch notices it, a new epoch begins."""
        del self.messages[len(self.messages) - min(count, len(self.messages)) :]
        self.number = number_of(self.messages[-1].position) if self.messages else 0
        self.epoch += is_noticed

    def rows(self, position: int, reach: Reach = UNBOUNDED) -> list[Row]:
        """Return what `sql.messages_after` reads."""
        end = max(position, reach.end) if reach.end is not None else 1 << 62
        return [each.row for each in self.messages if position <= each.position <= end]


@given(st.integers(0, 9), st.integers(0, 12), st.integers(0, 9), st.integers(0, 12), st.booleans(), st.booleans())
@settings(max_examples=tries(300))
def test_what_follows_in_the_log(
    first: int, at: int, later: int, pruned: int, is_known: bool, changes_epoch: bool
) -> None:
    """All that is behind the offset is read, once and in order, over epochs; so many are missed as were pruned."""
    log = Log()
    log.send(first)
    log.epoch += changes_epoch
    log.send(later)
    sent = list(log.messages)
    offset = sent[min(at, len(sent)) - 1] if at and sent else None
    if sent:
        log.prune(pruned)
    position, message_id = (offset.position, offset.id if is_known else None) if offset else (0, None)
    unread = [each for each in sent if each.position > position]
    left = [each for each in log.messages if each.position > position]
    progress = ConsumerProgress(OF, position, message_id)
    read = progress.read(log.rows(position), subscription(on_pruned="skip"))
    assert read is not None
    assert [(entry.position, entry.id) for entry in read] == [(each.position, each.id) for each in left]
    assert all(entry.message and entry.message.queue_end == sent[-1].position for entry in read)
    if len(left) < len(unread):
        with pytest.raises(MessagesPruned, match=f"the messages {number_of(position) + 1} to"):
            progress.read(log.rows(position), subscription())
    else:
        assert progress.read(log.rows(position), subscription()) == read


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 12), st.booleans())
@settings(max_examples=tries(300))
@example(sent=5, at=5, lost=2, later=0, is_noticed=False)
def test_a_log_that_went_back(sent: int, at: int, lost: int, later: int, is_noticed: bool) -> None:
    """It is noticed if and only if the message that the group has read last is gone."""
    log = Log()
    log.send(sent)
    offset = log.messages[min(at, sent) - 1]
    log.lose(lost, is_noticed=is_noticed)
    log.send(later)
    progress = ConsumerProgress(OF, offset.position, offset.id)
    read = progress.read(log.rows(offset.position), subscription())
    assert (read is None) == (offset not in log.messages)
    if log.messages:
        last = log.messages[-1]
        looked = progress._replace(end=last.position)
        behind = last.position != offset.position or last.id != offset.id
        assert looked.is_behind(last.position, last.id, is_standby=False) == behind
        assert looked.is_behind(last.position, last.id, is_standby=True) == (
            behind and last.position >= offset.position
        )


@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.integers(0, 9))
def test_no_growth_is_read_over(offsets: list[int], position: int) -> None:
    """Up to its end of then an old queue is read; what follows when all that had its keys were consumed."""
    limits = reach([Growth(4, (3, 5))], 0, dict(enumerate(offsets)), offsets[0])
    progress = ConsumerProgress(OF, offsets[0], reach=limits, end=9)
    assert limits.grown == (4 if offsets[0] >= 3 else 0)
    # A group that was moved back reads over no growth until the next look.
    moved = progress.at((position, 0, None, 0))
    assert moved.reach == (limits if position >= offsets[0] else Reach(0, position, position))
    if limits.end is not None:
        assert progress._replace(position=3).read([], subscription()) == []
    assert progress._replace(position=3, reach=UNBOUNDED).read([], subscription()) is None


# --- a group's way through a queue ------------------------------------------------------------------------------------


@dataclass
class Inboxed:
    """A row of the inbox."""

    status: Status
    position: int
    attempts: int = 0
    wait: float = 0.0
    passage: int = 0
    key: str | None = None


@dataclass
class Town:
    """The rows of a group and a queue, and what workers did: a model of what the consumer reads and writes."""

    log: list[Sent]
    ordered: bool | str
    batch: int
    killers: frozenset[UUID]
    failing: dict[UUID, int]
    inbox: dict[UUID, Inboxed] = field(default_factory=dict)
    offset: tuple[int, int, UUID | None, int] = (0, 0, None, 0)
    began: int = 0
    done: Counter[tuple[UUID, int]] = field(default_factory=Counter)
    deaths: Counter[UUID] = field(default_factory=Counter)
    parked: Counter[UUID] = field(default_factory=Counter)

    def known(self, entry_id: UUID) -> Row:
        """Return a row of `sql.known`."""
        row = self.inbox[entry_id]
        return entry_id, row.status, row.attempts, row.wait, OF.queue, row.position, False, row.passage, None

    def write(self, progress: ConsumerProgress) -> None:
        """Append an offset: nothing is passed over but what the inbox has, or the group doesn't take."""
        before, _, _, passage = self.offset
        assert progress.position >= before
        for each in self.log:
            if before < each.position <= progress.position and each.matches:
                row = self.inbox[each.id]
                assert row.passage == passage or row.position <= self.began or not row.status.reread, each
        assert progress.passage == passage
        if progress.position > before:
            assert progress.message_id == {each.position: each.id for each in self.log}[progress.position]
        self.offset = progress.position, progress.starts, progress.message_id, passage

    def settle(self, entry: Entry, status: Status, attempts: int = 1, wait: float = 0.0) -> None:
        """Write the inbox row of a message."""
        self.inbox[entry.id] = Inboxed(status, entry.position, attempts, wait, self.offset[3], entry.key)
        self.parked[entry.id] += status is Status.PARKED

    def held(self) -> set[str | None]:
        """Return the keys that are held back."""
        if self.ordered != "key":
            return set()
        return {row.key for row in self.inbox.values() if row.status.open and row.passage == self.offset[3]} - {None}

    def step(self, worker: ConsumerProgress, *, is_new: bool) -> ConsumerProgress:
        """Make a step of a worker; return what it knows then, a new one's progress if it has died."""
        known = worker.at(self.offset)
        progress = known if known.passage == worker.passage else known._replace(began=self.began)
        rows = [each.row for each in self.log if each.position >= progress.position]
        entries = progress.read(rows, subscription())
        assert entries is not None
        entries = entries[: 1 if progress.one_by_one else self.batch]
        if not entries:
            return progress
        ids = {entry.id for entry in entries} & self.inbox.keys()
        again = {id_ for id_ in ids if progress.is_earlier(self.known(id_))}
        inbox = KnownRows({id_: self.known(id_) for id_ in ids - again}, self.held(), again)
        batch = progress.batch(entries, inbox, ordered=self.ordered is True)
        first = entries[0]
        assert batch.again == again
        if not batch.passed:
            return self._stopped(progress, first, batch.stop)
        beginning = progress.begin(runs=batch.run[:1] == batch.passed[:1], is_new=is_new, most=MOST_STARTS)
        if beginning is Beginning.LEAVE:
            return progress._replace(position=-1)
        if beginning is Beginning.PARK:
            assert first.id in self.killers
            self.settle(first, Status.PARKED)
            after = progress._replace(started=progress.started or -1, one_by_one=self.batch).past(first, 0)
            self.write(after)
            return after
        if beginning is Beginning.START:
            self.write(progress._replace(starts=progress.total))
            return progress._replace(started=progress.position, one_by_one=self.batch if progress.starts else 0)
        return self._run(progress, batch)

    def _stopped(self, progress: ConsumerProgress, first: Entry, stop: Choice | None) -> ConsumerProgress:
        if stop is Choice.STOP:
            assert self.ordered is True
            self.inbox[first.id].wait = 0.0
            return progress
        assert stop is Choice.RESENT
        self.inbox[first.id] = replace(self.inbox[first.id], status=Status.FAILED, wait=0.0, position=first.position)
        if self.ordered is True:
            return progress
        self.write(progress.past(first))
        return progress.past(first)

    def _run(self, progress: ConsumerProgress, batch: Any) -> ConsumerProgress:
        assert not {entry.key for entry in batch.run if entry.key} & self.held() or batch.is_retry
        failed: list[Entry] = []
        for entry in batch.run:
            if entry.id in self.killers:
                self.deaths[entry.id] += 1
                return ConsumerProgress(OF)
            if self.failing.get(entry.id, 0) > 0:
                failed.append(entry)
                break
        if failed and len(batch.run) > 1:
            return progress._replace(one_by_one=self.batch)
        for entry in batch.wait:
            if not failed or entry.position < failed[0].position:
                self.settle(entry, Status.WAITING)
        if failed:
            self.failing[failed[0].id] -= 1
            self.settle(failed[0], Status.FAILED, batch.attempt, 1.0)
            if self.ordered is True:
                self.offset = progress.position, 0, progress.message_id, progress.passage
                return progress
            self.write(progress.past(failed[0]))
            return progress.past(failed[0])
        for entry in batch.run:
            self.done[entry.id, progress.passage] += 1
            self.settle(entry, Status.CONSUMED, batch.attempt)
        after = progress.past(batch.passed[-1], len(batch.passed))
        self.write(after)
        return after


@st.composite
def towns(draw: st.DrawFn) -> Town:
    """Return a town with a log in which some messages kill, fail, aren't for the group, or were sent again."""
    orders: list[bool | str] = [False, True, "key"]
    ordered = draw(st.sampled_from(orders))
    log: list[Sent] = []
    for number in range(1, draw(st.integers(1, 12)) + 1):
        matches = draw(st.integers(0, 5)) > 0
        log.append(Sent(number, UUID(int=number), 1, draw(st.sampled_from([None, "a", "b"])), matches))
        if draw(st.integers(0, 4)) == 0:
            earlier = draw(st.sampled_from(log))
            log[-1] = replace(earlier, position=number, send=earlier.send + 1)
    ids = sorted({each.id for each in log})
    some = st.frozensets(st.sampled_from(ids), max_size=2)
    failing = {id_: draw(st.integers(1, 2)) for id_ in draw(some)}
    return Town(log, ordered, draw(st.integers(1, 4)), draw(some) - failing.keys(), failing)


@given(towns(), st.lists(st.integers(0, WORKERS - 1), max_size=40), st.lists(st.integers(0, 9), max_size=1))
@settings(max_examples=tries(300), deadline=None)
def test_a_group_comes_to_the_end_of_its_queue(town: Town, schedule: list[int], resets: list[int]) -> None:
    """Workers that race, die and come back handle each message once, and park those alone that kill workers."""
    workers, end = [ConsumerProgress(OF)] * WORKERS, town.log[-1].position
    for number in range(500):
        index = schedule[number] if number < len(schedule) else number % WORKERS
        others = workers[:index] + workers[index + 1 :]
        is_new = any(other.started == town.offset[0] for other in others)
        workers[index] = town.step(workers[index], is_new=is_new)
        if town.offset[0] < end:
            continue
        if not resets:
            break
        town.began = min(resets.pop(), end)
        ids = {each.position: each.id for each in town.log}
        town.offset = town.began, 0, ids.get(town.began), town.offset[3] + 1
    assert town.offset[0] == end, town
    assert {id_ for id_, count in town.parked.items() if count} <= town.killers
    assert max(town.done.values(), default=1) == 1
    for id_, deaths in town.deaths.items():
        sends = sum(each.id == id_ for each in town.log) * (town.offset[3] + 1)
        # Twice in a batch that was begun without a suspicion, and then beside its own starts, by each that had begun.
        assert deaths <= (MOST_STARTS + 2 + WORKERS) * sends
    left = {each.id for each in town.log if each.matches} - town.inbox.keys()
    assert left == set()
    for id_, row in town.inbox.items():
        assert id_ not in town.killers or row.status is not Status.CONSUMED
        if town.ordered is True:
            assert row.status in {Status.CONSUMED, Status.PARKED}


def test_an_offset_is_written_as_it_is_read() -> None:
    """The values of the one statement that appends an offset, by its columns."""
    progress = ConsumerProgress(OF).at((7, 2, UUID(int=7), 4))
    assert progress.append() == sql.append_offset("outbox", "g", "t", 3, 7, 2, UUID(int=7), 4)
    assert progress.at((8, 0, None, 5)).passage == 5


@given(st.integers(0, 5), st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_messages_run_one_by_one_beside_a_start(one_by_one: int, batches: list[int]) -> None:
    """After a failure or a crash, so many; each leaves a start beside the offset for the next, by this worker."""
    progress, position = ConsumerProgress(OF, 0, one_by_one=one_by_one, started=0), 0
    for number, taken in enumerate(batches, 1):
        position += taken
        progress = progress.past(Entry(position, UUID(int=number), None), taken)
        left = max(one_by_one - position, 0)
        assert (progress.position, progress.one_by_one, progress.starts) == (position, left, int(left > 0))
        assert progress.started == max((at for at in _ends(batches[:number]) if at < one_by_one), default=0)


def _ends(batches: list[int]) -> list[int]:
    return [sum(batches[:number]) for number in range(1, len(batches) + 1)]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_message_is_to_blame_after_too_many_starts(is_new: bool) -> None:
    """Not while one may live that has started just now, not if no handler would run, not beside an own start."""
    at = ConsumerProgress(OF, 7)
    blamed = Beginning.LEAVE if is_new else Beginning.PARK
    for starts in range(2 * MOST_STARTS):
        over = starts >= MOST_STARTS
        new, old, own = (at._replace(starts=starts, started=started) for started in (None, 5, 7))
        begun = [each.begin(runs=True, is_new=is_new, most=MOST_STARTS) for each in (new, old, own)]
        assert begun[0] is (blamed if over else Beginning.START)
        assert begun[1] is (blamed if starts > MOST_STARTS else Beginning.GO_ON)
        assert begun[2] is Beginning.GO_ON
        assert new.begin(runs=False, is_new=is_new, most=MOST_STARTS) is Beginning.START
        assert new.total == starts + 1 == old.total + 1 == new.crash().starts + 1


@given(st.integers(0, 3), st.integers(4, 6), st.sampled_from([*Status]), st.booleans(), st.integers(2, 4))
def test_what_an_earlier_passage_had_is_handled_again(
    passage: int, position: int, status: Status, discarded: bool, queue: int
) -> None:
    """From behind where this one began, in this queue, unless it was set aside for ever."""
    progress = ConsumerProgress(OF, 9, passage=2, began=5)
    row = UUID(int=1), status, 1, 0.0, queue, position, discarded, passage, None
    is_earlier = passage < 2 and position > 5 and queue == 3 and status.reread and not discarded
    assert progress.is_earlier(row) == is_earlier


ROWS = st.sampled_from([None, Status.CONSUMED, Status.FAILED, Status.PARKED, Status.WAITING])


@given(st.lists(st.tuples(ROWS, st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=6), st.booleans())
@settings(max_examples=tries(300))
def test_what_becomes_of_a_batch(messages: list[tuple[Status | None, bool, bool, bool]], ordered: bool) -> None:
    """A message that is new runs or waits, one that is known is passed, one to be retried is alone."""
    sent, known = [], {}
    for number, (status, is_due, is_again, is_held) in enumerate(messages, 1):
        sent.append(Sent(number, UUID(int=number), 1 + is_again, "held" if is_held else None))
        if status is not None:
            at = number - 1 if is_again else number
            known[UUID(int=number)] = UUID(int=number), status, 2, 0.0 if is_due else 5.0, OF.queue, at, False, 0, NOW
    entries = ConsumerProgress(OF, 0).read([each.row for each in sent], subscription())
    assert entries is not None
    batch = ConsumerProgress(OF, 0).batch(entries, KnownRows(known, {"held"}), ordered=ordered)
    expected: list[Choice] = []
    for status, is_due, is_again, is_held in messages:
        if status is None:
            expected.append(Choice.WAIT if is_held else Choice.RUN)
        elif is_again and status in {Status.FAILED, Status.PARKED}:
            expected.append(Choice.RESENT)
        elif status is Status.FAILED and ordered:
            expected.append(Choice.RUN if is_due else Choice.STOP)
        else:
            expected.append(Choice.PASS)
    retries = [each is Choice.RUN and status is not None for each, (status, *_) in zip(expected, messages, strict=True)]
    stops = [each in {Choice.RESENT, Choice.STOP} or again for each, again in zip(expected, retries, strict=True)]
    passed = stops.index(True) if any(stops) else len(stops)
    assert batch.is_retry == (passed == 0 and retries[0])
    assert (batch.attempt, batch.first_failed_at) == ((3, NOW) if batch.is_retry else (1, None))
    passed += batch.is_retry
    assert batch.passed == entries[:passed]
    assert batch.run == [entry for entry, each in zip(entries, expected[:passed], strict=False) if each is Choice.RUN]
    assert batch.wait == [entry for entry, each in zip(entries, expected[:passed], strict=False) if each is Choice.WAIT]
    assert batch.stop == (None if batch.is_retry or not any(stops) else expected[passed])
