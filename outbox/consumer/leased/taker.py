"""Take messages for a client: write that it has them, under leases, and the offset behind them, in one transaction.

A take hands out first what is due again: messages that failed, and those whose lease has ended. Then it reads on in the
queues, as a consumer does: under the queue's lock, after the group's offset, by what a `ConsumerProgress` says of the
rows. Only that no handler runs: a message that would run becomes a row that is `taken`, and the group goes past it.
What happens then is said under the lease, in a transaction of the client's own (`outbox.consumer.leased.settlement`).

Several processes take for one group at once. A queue that another one reads at this moment is passed over. No start is
written beside the offset, since nothing runs here that could kill a worker: the leases of a client that dies end.

Of a group that is ordered by key, a taken message holds back the later ones of its key, as a failed one does
(`outbox.consumer.key_order`). What one take reads of a key, it hands out together, in order; so it does with what has
waited and was never tried. When one of it fails, the later ones are given back (`leased.sql.hold_back`). A message that
is tried again comes alone: those behind it aren't handed out while it may fail once more, and don't pay an attempt each
time that its lease lapses.
"""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from outbox.calling.callback import parked_callback
from outbox.consumer import key_order
from outbox.consumer import sql as consumer_sql
from outbox.consumer.consumer import Consumer, QueueConsumer
from outbox.consumer.failure import expired_of, record_expiry
from outbox.consumer.leased import settlement, sql
from outbox.consumer.leased.settlement import MessageLease, Taken, record
from outbox.consumer.log_loss import go_back
from outbox.consumer.outside import sql as lease_sql
from outbox.consumer.passage import begun, take_earlier
from outbox.consumer.progress import Batch, Choice, ConsumerProgress, KnownRows
from outbox.consumer.retry import PRUNED
from outbox.consumer.subscription import EVERYTHING, Entry, event_of, filter_of, settled, to_entry
from outbox.database.at_commit import after_commit, at_commit
from outbox.database.execute import Row, Statement, execute, read_log, read_source
from outbox.database.session import begin
from outbox.database.sql import plan_by_index, try_lock
from outbox.errors import MessagesPruned
from outbox.message.answer import HandlerFailure
from outbox.message.model import Message, Status
from outbox.telemetry.hooks import emit
from outbox.text import kind_of_text

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How many messages one take hands out at most.
MOST_TAKEN = 1_000
#: How often one take looks at the queues, where others read them or have changed their rows meanwhile, or what it reads
#: has to wait or isn't for the client; and at how many at least, if so many have messages.
_LOOKS, _QUEUES = 6, 4
#: So many times more than the look before it a look reads of a queue, and so much at most.
_MORE, _MOST_READ = 8, 256


def _taken(progress: ConsumerProgress, entry: Entry, number: int, until: dt.datetime) -> Taken:
    """Return a new message as it was taken."""
    of, message = progress.of, entry.message
    assert message is not None  # noqa: S101 - of those that run
    message.passage = progress.passage
    return Taken(message, MessageLease(of.group, of.topic, of.queue, entry.position, entry.id, number), 1, until)


def _accepted(entry: Entry, accepts: Callable[[Message], bool] | None) -> Entry:
    """Return an entry as a filter leaves it: without its message, if it is to be passed."""
    if accepts is None or entry.message is None or accepts(entry.message):
        return entry
    return Entry(entry.position, entry.id, None)


def _turn(found: tuple[Row, Sequence[Row]]) -> tuple[int, int]:
    """Return where a row that was taken comes among those of its key."""
    row, _ = found
    return row[12] or 0, row[2]


def _fitting(progress: ConsumerProgress, entries: list[Entry], inbox: KnownRows, most: int) -> Batch | None:
    """Return the batch up to the first message that is too many to be taken; None if that is the first of all."""
    batch = progress.batch(entries, inbox, ordered=False)
    if len(batch.run) <= most:
        return batch
    extra = batch.run[most]
    fitting = list(itertools.takewhile(lambda entry: entry is not extra, entries))
    return progress.batch(fitting, inbox, ordered=False) if fitting else None


class Taker(Consumer):
    """What takes messages of one leased `Subscription`, for any clients; used by one thread at a time.

    To be started as any consumer (`outbox.leases.StartedTaker`). Of the connections, the first is on the consumer's
    database, the second on the producer's, the same object twice where that is one; neither is in a transaction.
    """

    def take(
        self,
        connection: Connection,
        source: Connection,
        most: int,
        *,
        invisible: float,
        taker: str | None = None,
        take_id: str | None = None,
        accepts: Callable[[Message], bool] | None = None,
    ) -> list[Taken]:
        """Take at most so many messages for ``invisible`` seconds; those that are due again come first.

        ``taker`` names the client, ``take_id`` this take: one that is repeated under its name, since its answer was
        lost, has the same messages again, under new leases, as long as the old ones last. What ``accepts`` refuses is
        passed for ever, as by a filter.

        Raises:
            MessagesPruned: a queue is stuck by that, and there is nothing to take in the others.
        """
        schema, named = self._settings.schema, {"taker": taker, "take_id": take_id, "invisible": invisible}
        pair = {"group": self.subscription.group, "topic": self.subscription.feed}
        if take_id is not None:
            with begin(connection):
                (rows,) = execute(connection, sql.take_again(schema, **pair, **named))
            if rows:
                return self._found(connection, source, rows)
        admitted = self.gate.admitted(connection)
        most = min(most, MOST_TAKEN) if admitted is None else min(most, MOST_TAKEN, admitted)
        if most < 1:
            return []
        taken = self._take_due(connection, source, most, named)
        if len(taken) < most:
            taken += self._take_new(connection, source, most - len(taken), named, accepts)
        self.gate.began(len(taken))
        return taken

    # --- what is due again ----------------------------------------------------------------------------------

    def _take_due(self, connection: Connection, source: Connection, most: int, named: dict[str, Any]) -> list[Taken]:
        subscription, settings = self.subscription, self._settings
        if subscription.by_key:
            key_order.release(connection, source, subscription, settings.schema)
        pair = {"group": subscription.group, "topic": subscription.feed}
        due = sql.take_due(settings.schema, **pair, **named, limit=most, error=sql.LAPSED)
        with begin(connection):
            _, rows = execute(connection, plan_by_index(), due)
            left = [row for row in rows if not (row[9] and self._ends_lapsed(connection, source, row))]
            first = [row[0] for row in left if row[6] and row[11] is not None]
            if first and len(left) < most:
                limits = {"ids": first, "limit": most - len(left)}
                (rows,) = execute(connection, sql.take_following(settings.schema, **pair, **named, **limits))
                left += rows
        return self._found(connection, source, left)

    def _ends_lapsed(self, connection: Connection, source: Connection, row: Row) -> bool:
        """Write down that a lease has lapsed, which was an attempt; True if it was the last one of its message."""
        settings, subscription = self._settings, self.subscription
        lease, attempts, client, key = self._lease_of(row), row[3], row[10], row[11]
        failure = HandlerFailure(row[13], kind=row[14] or kind_of_text(row[13]), delay=0.0)
        if attempts > len(subscription.retry_delays) and subscription.on_exhausted != "block":
            found: list[Row] = []
            if parked_callback(subscription) is not None:  # which gets the body, also where its source is elsewhere
                (found,) = read_source(source, consumer_sql.message_by_id(settings.schema, id=row[0], **EVERYTHING))
            message = to_entry(found[0], subscription, lease.queue).message if found else None
            facts = {"key": key, "worker": client, "message": message}
            record(connection, subscription, settings, lease, failure, attempts=attempts, **facts)
            return True
        of = subscription.queue(settings.schema, lease.queue)
        error, kind = failure.error, failure.kind
        update = consumer_sql.InboxUpdate(
            lease.message_id, lease.position, Status.FAILED.value, attempts, None, error, 0.0, kind
        )
        at_commit(connection, consumer_sql.write_attempt(of, update, client or ""))
        after_commit(connection, partial(emit, event_of(of, update)))
        return False

    def _lease_of(self, row: Row) -> MessageLease:
        return MessageLease(self.subscription.group, self.subscription.feed, row[1], row[2], row[0], row[4])

    def _found(self, connection: Connection, source: Connection, rows: Sequence[Row]) -> list[Taken]:
        """Return messages that were taken, as they were sent first; what isn't there any more is parked."""
        if not rows:
            return []
        schema, subscription, taken = self._settings.schema, self.subscription, list[Taken]()
        # One that was never attempted (its quarantine was released) hasn't been through the group's filter.
        reads = [
            consumer_sql.message_by_id(schema, id=row[0], **(filter_of(subscription) if row[6] else EVERYTHING))
            for row in rows
        ]
        held = set[str | None]()
        # By their turns, in which those of one key come in order.
        for row, found in sorted(zip(rows, read_source(source, *reads), strict=True), key=_turn):
            lease, attempts = self._lease_of(row), row[3]
            message = to_entry(found[0], subscription, lease.queue).message if found else None
            if message is None or row[11] in held:
                with begin(connection):
                    if row[11] in held:
                        settlement.give_back(connection, schema, [lease])
                    elif found:  # it isn't for the group
                        execute(connection, consumer_sql.forget(schema, lease.group, lease.message_id))
                    elif self._is_gone(connection, lease, attempts, row[11]):
                        held.add(row[11])
                continue
            message.attempt, message.first_failed_at, message.passage = attempts + 1, row[7], row[8]
            taken.append(Taken(message, lease, attempts + 1, row[5]))
        return self._but_expired(connection, taken)

    def _is_gone(self, connection: Connection, lease: MessageLease, attempts: int, key: str | None) -> bool:
        """Park a message that its producer has no more; tell whether it holds back the later ones of its key."""
        row = record(connection, self.subscription, self._settings, lease, PRUNED, attempts=attempts + 1, key=key)
        return key is not None and row.holds

    def _but_expired(self, connection: Connection, taken: list[Taken]) -> list[Taken]:
        """Return what was taken without the messages that have expired, of which the inbox says so."""
        entries = [Entry(each.lease.position, each.message.id, each.message) for each in taken]
        if not any(entry.can_expire for entry in entries):
            return taken
        with begin(connection):
            expired = expired_of(connection, entries)
            for each in taken:
                if (entry := expired.get(each.message.id)) is not None:
                    of = self.subscription.queue(self._settings.schema, each.lease.queue)
                    execute(connection, sql.expire(of.schema, group=of.group, id=entry.id, number=each.lease.number))
                    update = settled(entry, Status.EXPIRED, each.attempt - 1)
                    after_commit(connection, partial(emit, event_of(of, update)))
        return [each for each in taken if each.message.id not in expired]

    # --- what is new ----------------------------------------------------------------------------------------

    def _take_new(
        self,
        connection: Connection,
        source: Connection,
        most: int,
        named: dict[str, Any],
        accepts: Callable[[Message], bool] | None,
    ) -> list[Taken]:
        """Read on in the queues that have messages, a part of each in one transaction."""
        taken, pruned = list[Taken](), None
        for look in range(_LOOKS):
            waiting = self.waiting_queues(connection, source)
            if not waiting:
                break
            random.shuffle(waiting)
            try:
                left = most - len(taken)
                found, is_done = self._read_on(connection, source, waiting, left, _MORE**look, named, accepts)
            except MessagesPruned as error:
                pruned = error
                break
            except Exception as error:
                if consumer_sql.is_inbox_conflict(error, self._settings.schema):
                    continue  # the inbox has come to know one of them meanwhile: look again
                raise
            taken += found
            if is_done or len(taken) >= most:
                break
        if pruned is not None and not taken:
            raise pruned
        return taken

    def _read_on(
        self,
        connection: Connection,
        source: Connection,
        waiting: Sequence[QueueConsumer],
        most: int,
        times: int,
        named: dict[str, Any],
        accepts: Callable[[Message], bool] | None,
    ) -> tuple[list[Taken], bool]:
        """Take from some queues in one transaction. Return what, and whether a further look would find nothing more.

        It reads so many ``times`` what it may take.
        """
        # In the order in which all transactions lock several; a queue is only tried, so that none waits. Others may
        # read some of them at this moment.
        queues = sorted(waiting[: max(most, _QUEUES)], key=lambda queue: queue.progress.of.lock)
        share = -(-most // len(queues))
        share = max(share, min(share * times, _MOST_READ))
        with begin(connection):
            progresses = self._locked(connection, queues)
            reads = [each.next_messages(self.subscription, self._settings, share) for each in progresses]
            ahead = read_log(connection, source, plan_by_index(), *reads)[1:] if reads else []
            entries: dict[ConsumerProgress, list[Entry]] = {}
            pruned = None
            for progress, rows in zip(progresses, ahead, strict=True):
                try:
                    read = progress.read(rows, self.subscription)
                except MessagesPruned as error:
                    pruned = error  # the other queues have nothing to do with it
                    continue
                if read is None:
                    go_back(connection, source, progress)
                elif read:
                    entries[progress] = [_accepted(each, accepts) for each in read]
            taken = self._take_read(connection, source, entries, most, named) if entries else []
        if pruned is not None and not taken:
            raise pruned
        return taken, bool(progresses) and not entries

    def _locked(self, connection: Connection, queues: Sequence[QueueConsumer]) -> list[ConsumerProgress]:
        """Try the locks of queues; return how far the group is in those that this transaction has."""
        schema, statements = self._settings.schema, []
        for queue in queues:
            of = queue.progress.of
            statements += [try_lock(of.lock, consumer_sql.MARKING), consumer_sql.offset(schema, *of.values)]
        results, progresses = iter(execute(connection, *statements)), list[ConsumerProgress]()
        for queue, locked, offsets in zip(queues, results, results, strict=True):
            offset = offsets[0] if offsets else consumer_sql.NO_OFFSET
            if not locked[0][0] or offset[4]:  # another one reads it, or a worker has leased it
                continue
            if offset[4] is False:
                execute(connection, lease_sql.end_lease(schema, *queue.progress.of.values))
            progresses.append(begun(connection, queue.progress.at(offset)))
        return progresses

    def _take_read(
        self,
        connection: Connection,
        source: Connection,
        entries: dict[ConsumerProgress, list[Entry]],
        most: int,
        named: dict[str, Any],
    ) -> list[Taken]:
        """Take at most so many of the entries that were read, as far as the inbox lets them, and go past them."""
        statements = {each: each.inbox_of(several, self.subscription) for each, several in entries.items()}
        _, *rows = execute(connection, plan_by_index(once=True), *(it for its in statements.values() for it in its))
        results, batches = iter(rows), list[tuple[ConsumerProgress, Batch, list[Entry]]]()
        for progress, several in entries.items():
            inbox = KnownRows.of([next(results) for _ in statements[progress]])
            left = take_earlier(connection, source, progress, inbox) if progress.passage else inbox
            if left is None:  # a retry, or an operator's act, has one of them
                continue
            batch = _fitting(progress, several, left, most)
            if batch is None:
                continue
            most -= len(batch.run)
            if batch.stop is Choice.RESENT and not batch.passed:
                if not execute(connection, progress.resend(several[0]))[0]:
                    continue
                batch = Batch(passed=several[:1])
            batches.append((progress, batch, self._go_past(connection, progress, batch)))
        # Of all queues in one round trip.
        written = execute(connection, *(each for them in batches for each in self._write(*them, named)))
        leases = {id_: (number, until) for rows in written for id_, number, until in rows}
        return [_taken(progress, entry, *leases[entry.id]) for progress, _, run in batches for entry in run]

    def _go_past(self, connection: Connection, progress: ConsumerProgress, batch: Batch) -> list[Entry]:
        """Have the COMMIT write all of a batch but what is taken, and the offset; return the messages to take."""
        of, passage, run = progress.of, progress.passage, list(batch.run)
        expired = expired_of(connection, run) if any(entry.can_expire for entry in run) else {}
        for entry in expired.values():
            record_expiry(connection, of, entry, 0, passage)
        at_commit(connection, *key_order.wait(of, batch.wait, passage, batch.again))
        if batch.inline:
            ids, positions = [each.id for each in batch.inline], [each.position for each in batch.inline]
            values = {"group": of.group, "queue": of.queue, "passage": passage}
            at_commit(connection, consumer_sql.give_positions(of.schema, ids=ids, positions=positions, **values))
        after = progress.past(batch.passed[-1], len(batch.passed))
        at_commit(connection, after.append())
        return [entry for entry in run if entry.id not in expired]

    def _write(
        self, progress: ConsumerProgress, batch: Batch, run: Sequence[Entry], named: dict[str, Any]
    ) -> Iterator[Statement]:
        """Write the rows of messages that are taken; those that this passage handles again have one.

        In the order of the log: each statement gives the next turns of a key.
        """
        of, passage = progress.of, progress.passage
        values = {"group": of.group, "topic": of.topic, "queue": of.queue, "passage": passage, **named}
        for again, entries in itertools.groupby(run, lambda entry: entry.id in batch.again):
            columns = self._columns(list(entries))
            if again:
                yield consumer_sql.keep_earlier(of.schema, group=of.group, ids=columns["ids"], passage=passage)
            take = sql.take_reread if again else sql.take_new
            yield take(of.schema, **values, **columns)

    def _columns(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {
            "ids": [entry.id for entry in entries],
            "positions": [entry.position for entry in entries],
            "digests": [entry.digest() for entry in entries],
            "keys": [entry.key if self.subscription.by_key else None for entry in entries],
        }
