"""One pass of the compensations: look, quarantine, compensate; item by item, and each step by a commit of its own.

No transaction spans two databases, and a worker may die between any two steps. What makes it right all the same:

- The item stays pending until all is done, and is due again when the worker that leased it has had its time. Each step
  finds what an earlier try has left, and goes on from there.
- Quarantines come first. While they stand, the message takes no effect; and they stand as long as a worker may
  compensate.
- Compensation, its record and the end of the item are one transaction. The record's primary key is the message, so a
  second worker waits for the first, and finds it done.
- A worker that must not compensate the message (it was consumed, the bulk job was cancelled) first writes that down,
  which excludes that another one ends the item as done; then releases the quarantines; then ends the item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.calling.engine import CallRunners, hangs
from outbox.compensate import quarantine, sql
from outbox.compensate.compensation import BUSY, UNREACHABLE, Compensation, InboxDatabase, InboxDatabases, Postponed
from outbox.compensate.run import LEASE, CompensationItem, CompensationRun, ItemTable, StaleItem
from outbox.database.duty import BULK, Duty, Post, Task, alone
from outbox.database.engines import NewRunner
from outbox.database.execute import Row, execute
from outbox.database.sql import finish_bulk_jobs, plan_by_index
from outbox.message.model import Counts, Resolution
from outbox.settings import Settings
from outbox.telemetry.events import (
    CompensationAttemptFailed,
    CompensationEnded,
    CompensationPostponed,
    MessageCompensated,
)
from outbox.telemetry.hooks import emit
from outbox.text import summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long (seconds) after the first try of a compensation the second comes. Each further wait is twice as long, but a
#: day at most.
FIRST_RETRY = 30.0
_LONGEST_WAIT = 86400.0


def compensate_once(
    connection: Connection,
    settings: Settings,
    *,
    compensations: Mapping[str, Compensation],
    new_runner: NewRunner,
    stopping: Callable[[], bool] = lambda: False,
    limit: int = 100,
) -> Counts:
    """Carry out compensations that are due, at most ``limit``, of the topics that have a compensation here.

    ``connection`` is on the producer's database and not in a transaction. ``new_runner`` makes the connections that
    compensations run on, given whether they are async; they are ended with the pass. ``stopping`` is asked between
    items.

    Returns ``taken`` items, ``done``: compensated, ``failed``: to be tried again, ``parked``: given up after
    `Settings.compensation_attempts`; the others were refused.
    """
    if not compensations:
        return Counts()
    with connection.begin():
        _, _, due = execute(
            connection,
            plan_by_index(),
            finish_bulk_jobs(settings.schema),
            sql.due(settings.schema, topics=sorted(compensations), limit=limit),
        )
    if not due:
        return Counts()
    lease = LEASE + max(each.timeout for each in compensations.values())
    items, databases = ItemTable(connection, settings.schema, lease), InboxDatabases(connection, settings.schema)
    runners = CallRunners(new_runner)
    run = _CompensationPass(items, databases, settings, compensations, runners, stopping)
    counts = Counts()
    try:
        for key in due:
            if stopping():
                return counts + Counts(more=True)
            counts += run.take(sql.Key(*key))
    finally:
        run.end()
    with connection.begin():
        execute(connection, finish_bulk_jobs(settings.schema))
    return counts + Counts(more=len(due) == limit)


@dataclass(slots=True)
class _CompensationPass:
    """What one pass keeps open: the consumers' databases, and a runner of each kind."""

    _items: ItemTable
    _databases: InboxDatabases
    _settings: Settings
    _compensations: Mapping[str, Compensation]
    _runners: CallRunners
    _stopping: Callable[[], bool]

    def end(self) -> None:
        """Close the connections."""
        self._databases.close()
        self._runners.end()

    def take(self, key: sql.Key) -> Counts:
        """Lease an item, and do what can be done about it."""
        if (item := self._items.lease(key)) is None:
            return Counts()
        try:
            state = self._carry_out(item)
        except Postponed as postponed:
            self._items.leave(item, f"{sql.WAITS}{postponed}", postponed.seconds)
            state = "pending"
            if not self._stopping():
                emit(CompensationPostponed(**_names(item), reason=str(postponed)))
        return Counts(1, int(state == "done"), int(state == "pending"), int(state == "failed"))

    def _carry_out(self, item: CompensationItem) -> str:
        """Go through the steps; return the state of the item.

        Raises:
            Postponed: nothing more can be done now.
        """
        schema, knowingly = self._settings.schema, item.acknowledged
        row, item = self._items.read(item)
        compensation = self._compensations[item.topic]
        databases = self._databases.of(compensation)
        if why := _why_not(item, row):
            return self._end(item, why, databases)
        most = self._settings.compensation_attempts
        if item.attempts > most:
            emit(CompensationAttemptFailed(**_names(item), attempt=item.attempts - 1, attempts=most))
            return self._items.close(item, "failed", "failed: the worker died over it each time")
        consumed, quarantined = [], []
        for database in databases:
            consumed += database.named(database.run(lambda each: quarantine.consumed_by(each, schema, item)))
        if consumed and not knowingly:
            return self._end(item, _delivered(consumed), databases)
        consumed = []
        for database in databases:
            made = database.run(lambda each: quarantine.quarantine(each, schema, item, acknowledged=knowingly))
            consumed += database.named(made.consumed)
            quarantined += database.named(made.quarantined)
            if consumed and not knowingly:
                # A consumer was faster than the quarantine, and slower than the look.
                return self._withdraw(item, _delivered(consumed), databases)
        return self._perform(CompensationRun(compensation, self._settings, item, consumed, quarantined), databases)

    def _end(self, item: CompensationItem, why: str, databases: list[InboxDatabase]) -> str:
        """End an item that is not to be carried out, before anything was quarantined in this try."""
        return self._refuse(item, why) if item.untouched else self._withdraw(item, why, databases)

    def _refuse(self, item: CompensationItem, why: str) -> str:
        """End the item, for which nothing was quarantined; return its state."""
        state = "skipped" if item.cancelled_by is None else "cancelled"
        emit(CompensationEnded(**_names(item), state=state, reason=why))
        return self._items.close(item, state, f"{sql.REFUSED}{why}")

    def _withdraw(self, item: CompensationItem, why: str, databases: list[InboxDatabase]) -> str:
        """Decide that the message will not be compensated, release the quarantines, end the item; return its state.

        Raises:
            Postponed: a database can't be asked now. The decision stands.
        """
        if not self._items.refuse(item, why):
            state, _ = self._items.ended(item)
            # Pending and yet not to be refused: it was compensated without an order, and the quarantines stay.
            return self._refuse(item, why) if state == "pending" else self._check_again(item, databases, why)
        # While the message wasn't out, no worker knew where the groups would pass it. Nor do we, if one died in
        # between.
        doubt = item.refused or not self._items.read(item)[1].sends
        self._release(item, databases)
        if doubt and self._items.ended(item)[0] == "pending":
            self._release(item, databases, doubt=True)
        return self._refuse(item, why)

    def _check_again(self, item: CompensationItem, databases: list[InboxDatabase], why: str) -> str:
        """Something came in between: if the item has ended by that, leave no quarantine behind; return its state.

        Raises:
            Postponed: it is to be done over.
        """
        state, compensated = self._items.ended(item)
        if state == "pending":
            raise Postponed(why, 0)
        if state in {"skipped", "cancelled"} and not compensated:
            self._release(item, databases)
        return state

    def _release(self, item: CompensationItem, databases: list[InboxDatabase], *, doubt: bool = False) -> None:
        """Release the item's quarantines; no worker compensates for it any more."""
        _, order = self._items.read(item)
        for database in databases:
            database.run(lambda each: quarantine.release(each, self._settings.schema, order, doubt=doubt))

    def _perform(self, run: CompensationRun, databases: list[InboxDatabase]) -> str:
        item = run.item
        if hangs(run.function):
            raise Postponed(f"{run.function.name} hangs in every thread that it may have", UNREACHABLE)
        error = self._runners.make(run)
        if run.done:
            emit(MessageCompensated(**_names(item)))
            return "done"
        if issubclass(type(error), StaleItem):
            return self._check_again(item, databases, str(error))
        if error is None or (self._stopping() and run.error is None):
            raise Postponed("the worker was stopped", 0)
        if run.argument is None:
            raise Postponed(summary_of(error).partition("\n")[0], BUSY if run.held else UNREACHABLE)
        return self._failed(run, error, lost=run.error is None)

    def _failed(self, run: CompensationRun, error: BaseException, *, lost: bool) -> str:
        item, failure = run.item, summary_of(error, run.argument.secrets if run.argument else ())
        most = self._settings.compensation_attempts
        emit(CompensationAttemptFailed(**_names(item), attempt=item.attempts, attempts=most, error=error))
        if item.attempts >= most:
            return self._items.close(item, "failed", f"failed {item.attempts} times, at last: {failure}")
        outcome = f"failed: {failure} (attempt {item.attempts} of {most})"
        # A lost connection counts, for the compensation may be what ends it; but mostly it isn't, and comes back soon.
        doublings = 0 if lost else min(item.attempts - 1, 20)
        return self._items.leave(item, outcome, min(FIRST_RETRY * 2**doublings, _LONGEST_WAIT))


def _names(item: CompensationItem) -> dict[str, Any]:
    return {"message_id": item.message_id, "topic": item.topic, "bulk_job": item.key.bulk_job_id}


def _why_not(item: CompensationItem, row: Row) -> str | None:
    """Return why the item is not to be carried out, as far as the producer's database knows."""
    if item.refused and item.outcome is not None:
        return item.outcome.partition("\n")[0].removeprefix(sql.REFUSED)
    if item.cancelled_by is not None:
        return f"cancelled by {item.cancelled_by}"
    return _refused(row)


def _delivered(consumed: list[str]) -> str:
    return (
        f"it took effect already: consumed by {', '.join(consumed)}; undo that there first, or compensate it with "
        "acknowledge_delivered"
    )


def _refused(row: Row) -> str | None:
    """Return why a message can't be compensated; by a row of `sql.states`; another bulk job on it doesn't matter."""
    _, topic, resolution, decided_by, compensated_at, by, _ = row
    if compensated_at is not None:
        return f"it was compensated already, at {compensated_at.isoformat()} (ordered by {by}); that happens once ever"
    if topic is None:
        return "no half message has this id; was it sent in another database, or pruned?"
    if resolution is None:
        return "it is not decided yet; roll the half back instead"
    if resolution != Resolution.COMMIT:
        return f"its local transaction was rolled back (by the {decided_by}): there is nothing to undo"
    return None


def _tasks(at: Post) -> Iterator[Task]:
    compensations = at.outbox.functions.of(Compensation)
    if compensations and "producer" in at.parts:
        one_pass = alone(compensate_once, at.settings, compensations=compensations, new_runner=at.new_runner)
        # A lane of its own: a compensation may take long.
        yield Task(name="compensate", one_pass=one_pass, every=at.settings.idle_wait, parts=("producer",))


DUTIES = (
    Duty(
        "compensate",
        "Undoes the local transactions behind messages, where that is ordered.",
        f"""
        producer: worker
        {BULK}
        SELECT ON half_message message
        SELECT INSERT UPDATE ON compensation
        SELECT UPDATE ON op_message
        consumer: worker
        SELECT ON message_source consumer_offset consumer_lease consumer_start reread_message
        SELECT INSERT UPDATE DELETE ON consumer_message
        INSERT ON audit
        """,
        role="bulk",
        tasks=_tasks,
        functions="compensations",
    ),
)
