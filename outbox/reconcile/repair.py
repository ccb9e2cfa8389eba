"""Repair what a reconciliation has found, through the framework's own functions.

Safe beside dispatchers, consumers, retries, prune, operators and another repair, and safe to kill and run again: each
act is one transaction in one database, which locks what it is about, looks whether it is still as it was found, acts,
and records the act. What has healed meanwhile is left alone.

A resend done twice would do no harm, since the inbox knows what it has; but each night would add a send. So the newest
send number decides: only a repair that still finds the one which the finding has may append the next.
"""

from __future__ import annotations

import datetime as dt
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import cast
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from outbox.acts.changes import STATES, ActRequest, ActRun, Target, apply, lock, resend
from outbox.acts.messages import ACTS
from outbox.database.execute import CONTENDED, CUT_OFF, Statement, execute, lock_key, sqlstate, statement
from outbox.database.sql import TOOK_EFFECT, audit, plan_by_index, take_lock, wait_at_most
from outbox.dispatch.dispatch_pass import dispatch_once, dispatch_passed, release_due_once
from outbox.dispatch.sql import compensated
from outbox.message.model import Status
from outbox.reconcile.foreign import KnownTable, known_table
from outbox.reconcile.job import DONE, HEALED, LABELED, Job, Outcome, Pair, Range, Repair
from outbox.reconcile.pairing import side_of
from outbox.reconcile.rows import Finding, Repaired, to_uuids
from outbox.reconcile.source import connected
from outbox.reconcile.sql import positions
from outbox.reconcile.tables import PRODUCER_COLUMNS, ForeignTable, InboxState
from outbox.text import summary_of

BUSY = "refused: busy: another transaction is working on it; run the reconciliation again"

#: How many messages an act is about at most.
BATCH = 500

#: How long (seconds) a statement waits for a lock; and how long a repair waits for dispatch to get on.
PATIENCE = 3.0


def repair(
    job: Job,
    pair: Pair,
    run_id: UUID,
    findings: Iterable[Finding],
    producer: Engine,
    consumer: Engine,
    report: Callable[[Sequence[Repaired]], None] = lambda _: None,
    *,
    why: str = "",
    origin: Mapping[str, str] | None = None,
) -> list[Repaired]:
    """Do what ``job.policy`` says about each difference of a pair; return what became of each attempt.

    ``findings`` are those of `rows.to_findings`, in any order; what the policy only alerts to, and what is no
    difference, is left out. ``producer`` and ``consumer`` are engines on the databases of ``job``. ``report`` gets the
    results of each batch once it is committed: it may write them down, and a repair that is killed has reported all
    but its last batch. ``why`` and ``origin`` go into the audit, where an operator has ordered it.

    Raises:
        sqlalchemy.exc.DBAPIError: a connection was lost. Run it again: repaired findings are found healed.
    """
    work = Work(job, pair, run_id, producer, consumer, why, origin or {})
    by_kind: dict[Outcome, list[Finding]] = {}
    for finding in findings:
        if finding.outcome.differs and finding.outcome.repair(job.policy, job.tables) is not Repair.ALERT:
            by_kind.setdefault(finding.outcome, []).append(finding)
    repaired: list[Repaired] = []
    for kind in sorted(by_kind):
        action = kind.repair(job.policy, job.tables)
        # By id, so that two repairs take their locks in the same order.
        found = sorted(by_kind[kind], key=attrgetter("id"))
        for batch in (found[start : start + BATCH] for start in range(0, len(found), BATCH)):
            results = attempt(_ACTS[action], work, batch)
            news = [Repaired(finding.id, kind, action, results[finding.id]) for finding in batch]
            report(news)
            repaired += news
    return repaired


# --- the two databases -----------------------------------------------------------------------------------

# One look-up for each id in what follows, whatever the statistics say.

# The consumer that runs the handler of a failed message holds its row: it is left alone.
_LOCK_INBOX = f"""
SELECT c.* FROM unnest(%(ids)s::uuid[]) AS m (id) CROSS JOIN LATERAL (
    SELECT message_id, status, attempts, changed_at, {TOOK_EFFECT} FROM {{s}}.consumer_message c
     WHERE consumer_group = %(group)s AND message_id = m.id
       FOR UPDATE SKIP LOCKED) c
"""

_STATUSES = """
SELECT c.* FROM unnest(%(ids)s::uuid[]) AS m (id) CROSS JOIN LATERAL (
    SELECT message_id, status FROM {s}.consumer_message
     WHERE consumer_group = %(group)s AND message_id = m.id OFFSET 0) c
"""

_EFFECTS = """
SELECT m.id, c.number FROM unnest(%(ids)s::uuid[]) AS m (id) CROSS JOIN LATERAL (
    SELECT count(*) AS number FROM {table} b WHERE b.{column} = m.id) c
"""

# Without a reason there is nothing to tell: a consumed row with an error is one that the handler has skipped.
_SETTLE_INBOX = """
UPDATE {s}.consumer_message
   SET status = %(status)s, next_attempt_at = NULL, starts = 0, changed_at = clock_timestamp(),
       taken_by = NULL, take_id = NULL, discarded_at = NULL, quarantined_by = NULL, quarantined_from = NULL,
       error_kind = CASE WHEN %(status)s = 'parked' THEN coalesce(error_kind, 'parked by a repair') END,
       last_error = CASE WHEN %(why)s::text IS NOT NULL THEN concat_ws('; before: ', %(why)s::text, last_error) END
 WHERE consumer_group = %(group)s AND message_id = ANY (%(ids)s::uuid[])
"""


@dataclass(frozen=True, slots=True)
class Work:
    """The repairs of one pair in one run, with an engine for each side's database."""

    job: Job
    pair: Pair
    run_id: UUID
    producer: Engine
    consumer: Engine
    why: str = ""
    origin: Mapping[str, str] = field(default_factory=dict)

    def reason(self, kind: Outcome) -> str:
        """Return what the audit gives as the reason of an act."""
        return f"reconciliation {self.run_id}: {kind.label}{f'; {self.why}' if self.why else ''}"

    def request(self, name: str, kind: Outcome) -> ActRequest:
        """Return an operator's act, as this run requests it for a finding of a kind."""
        return ActRequest(ACTS[name], self.job.actor, self.reason(kind), self.origin)

    def audits(self, action: Repair, results: Mapping[Finding, object], schema: str | None = None) -> list[Statement]:
        """Return what records acts in the consumer's database, or in that of another schema, each with its result."""
        schema, actor, group = schema or self.job.consumer.schema, self.job.actor, self.pair.group
        return [
            audit(
                schema, actor, action.value, f"{group}/{finding.id}", self.reason(finding.outcome), result, self.origin
            )
            for finding, result in results.items()
        ]

    def at_consumer(self, template: str, findings: Sequence[Finding], **values: object) -> Statement:
        """Return a statement about messages of the group, for the consumer's database."""
        values |= {"group": self.pair.group, "ids": ids_of(findings)}
        return statement(self.job.consumer.schema, template, values)

    def statuses(self, findings: Sequence[Finding]) -> Statement:
        """Read what the inbox says of messages. Rows: ``(id, status)``."""
        return self.at_consumer(_STATUSES, findings)

    def settle(self, findings: Sequence[Finding], status: Status, why: str | None) -> Statement:
        """Give locked inbox rows their last status; ``why`` is put before what they say of their failure."""
        return self.at_consumer(_SETTLE_INBOX, findings, status=status.value, why=why)

    def at_producer(self, template: str, findings: Sequence[Finding]) -> Statement:
        """Return a statement about messages, for the producer's database."""
        return statement(self.job.producer.schema, template, {"ids": ids_of(findings)})

    def effects(self, connection: Connection, findings: Sequence[Finding]) -> dict[UUID, int]:
        """Count the rows of each message in the consumer's business table; nothing where none is named."""
        if self.pair.effect is None:
            return {}
        table, column = self.pair.effect.quoted
        values = {"ids": ids_of(findings)}
        (rows,) = execute(connection, statement(self.job.consumer.schema, _EFFECTS, values, table=table, column=column))
        return dict(rows)


def ids_of(findings: Sequence[Finding]) -> list[UUID]:
    """Return the ids of findings, in their order."""
    return [finding.id for finding in findings]


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """Open a transaction in a database; it commits at the end of the block."""
    # READ COMMITTED, whatever the server's default: a read after a lock must be newer than the lock.
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection, connection.begin():
        execute(connection, wait_at_most(PATIENCE), plan_by_index())
        yield connection


@dataclass(frozen=True, slots=True)
class LockedRow:
    """An inbox row as it is now; it is locked. ``took_effect``: so it did in an earlier passage of the group."""

    status: Status
    attempts: int
    changed_at: dt.datetime
    took_effect: bool

    def result(self, finding: Finding) -> str:
        """Return `DONE`, for what may be done to it, if it is unchanged since the finding; else what it has become."""
        found = (finding.status, finding.attempts, finding.changed_at)
        if (InboxState.of(self.status), self.attempts, self.changed_at) == found:
            return DONE
        return f"refused: it has changed meanwhile: {self.status.value} after {self.attempts} attempts"


def with_locked(
    work: Work, connection: Connection, findings: Sequence[Finding], result: Callable[[Finding, LockedRow | None], str]
) -> dict[UUID, str]:
    """Lock the inbox rows of findings; return what ``result`` decides of each, by its row if there is one.

    A row that another transaction has locked isn't waited for, and is `BUSY`. The locks last until the commit.
    """
    # In this order: what is there and isn't locked by us has come meanwhile, or another transaction has it.
    locked, there = execute(connection, work.at_consumer(_LOCK_INBOX, findings), work.statuses(findings))
    rows = {row[0]: LockedRow(Status(row[1]), *row[2:]) for row in locked}
    busy = {message_id for message_id, _ in there} - rows.keys()
    return {each.id: BUSY if each.id in busy else result(each, rows.get(each.id)) for each in findings}


#: Does something about findings of one kind, in transactions of its own; returns the result of each, by id.
Repairer = Callable[[Work, Sequence[Finding]], dict[UUID, str]]

# So many messages of one batch that are locked mean that all are: a table is locked, or all of dispatch.
_MOST_BUSY = 3


def attempt(repairer: Repairer, work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the result of each message of a batch.

    Where the batch fails, it is done message by message, so that a bad row never stops the others.

    Raises:
        sqlalchemy.exc.DBAPIError: the connection was lost.
    """
    try:
        return repairer(work, batch)
    except DBAPIError as error:
        # Of one that took too long, the server may have ended the connection: each act opens one of its own.
        refusal = BUSY if len(batch) > 1 and sqlstate(error) in CUT_OFF else _refusal(error)
    results: dict[UUID, str] = {}
    vain = 0
    for finding in batch:
        if len(batch) > 1 and vain < _MOST_BUSY:
            try:
                results |= repairer(work, [finding])
                continue
            except DBAPIError as error:
                refusal = _refusal(error)
                vain += refusal == BUSY
        results[finding.id] = refusal
    return results


def _refusal(error: DBAPIError) -> str:
    code = sqlstate(error)
    if error.connection_invalidated or not code:
        raise error
    return BUSY if code in CONTENDED else f"refused: {summary_of(error.orig or error)}"


# --- acts of an operator, and dispatch -------------------------------------------------------------------

_DISPATCHED = """
SELECT h.id, h.body_digest FROM {s}.half_message h
 WHERE h.id = ANY (%(ids)s::uuid[]) AND EXISTS (SELECT FROM {s}.message m WHERE m.half_id = h.id)
"""

_LOCK_CHECKS = """
SELECT half_id, parked_at IS NULL AND next_check_at <= clock_timestamp() FROM {s}.half_check
 WHERE half_id = ANY (%(ids)s::uuid[])
 ORDER BY half_id
   FOR UPDATE SKIP LOCKED
"""

_CHECKS = "SELECT half_id FROM {s}.half_check WHERE half_id = ANY (%(ids)s::uuid[])"


def check_undecided(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Have the halves checked by the next pass, parked ones exactly once more, unless they are due to be checked."""
    with transaction(work.producer) as connection:
        # A decision locks this row first, for as long as its transaction runs: not waited for.
        locked, there = execute(connection, work.at_producer(_LOCK_CHECKS, batch), work.at_producer(_CHECKS, batch))
        due: dict[UUID, bool] = dict(locked)
        results = {half_id: BUSY for (half_id,) in there if half_id not in due}
        waiting = [half_id for half_id, is_due in due.items() if is_due]
        results |= dict.fromkeys(waiting, "refused: a check is due already; is a worker running that has its checker?")
        left = [Target(half_id) for half_id in ids_of(batch) if half_id not in results]
        request = work.request("check", batch[0].outcome)
        outcomes = apply(connection, work.job.producer.settings, request, left)
    for target, outcome in zip(left, outcomes, strict=True):
        gone = "refused: the producer has no half message of it any more" if outcome.was == "unknown" else HEALED
        results[target.message_id] = DONE if outcome.state == "done" else gone
    return results


def dispatch_undispatched(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Place what dispatch has passed; let it come to the others, and try again.

    What dispatch or release has made is healed: that is their work, nothing was mended.
    """
    results: dict[UUID, str] = {}
    left, settings, reason = ids_of(batch), work.job.producer.settings, work.reason(batch[0].outcome)
    progress = time.monotonic()
    while True:
        with transaction(work.producer) as connection:
            placed, ahead = dispatch_passed(connection, settings, left, actor=work.job.actor, reason=reason)
        results |= dict.fromkeys(left, HEALED) | dict.fromkeys(placed, DONE)
        if not ahead:
            return results
        left = ahead
        with work.producer.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            moved = dispatch_once(connection, settings), release_due_once(connection, settings)
        if any(moved):
            progress = time.monotonic()
        elif time.monotonic() - progress > PATIENCE:
            return results | dict.fromkeys(left, BUSY)
        else:
            time.sleep(0.05)  # another worker is dispatching, or a transaction holds up the re-base


def park(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Park the failed rows that are as they were found, and say why in their error."""
    results = _known_since(work, batch)
    left = [finding for finding in batch if finding.id not in results]
    with transaction(work.consumer) as connection:
        results |= with_locked(work, connection, left, _result)
        chosen = [finding for finding in left if results[finding.id] == DONE]
        why = f"parked by {work.reason(batch[0].outcome)}"
        execute(
            connection,
            work.settle(chosen, Status.PARKED, why),
            *work.audits(Repair.PARK, {finding: {"was": Status.FAILED.value} for finding in chosen}),
        )
    return results


def _result(finding: Finding, row: LockedRow | None) -> str:
    if row is None or row.status is Status.PARKED:
        return HEALED
    if row.status is Status.FAILED:
        return row.result(finding)
    if finding.outcome is Outcome.FAILED and not row.status.open:
        return HEALED  # its retry has succeeded, or was quarantined
    return f"refused: it is {row.status.value}: only a message that will be retried can be parked"


def _known_since(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the results of what the producer has come to know meanwhile: a phantom's message, the body that it had."""
    with transaction(work.producer) as connection:
        digests: dict[UUID, bytes] = dict(execute(connection, work.at_producer(_DISPATCHED, batch))[0])
    return {
        finding.id: HEALED
        for finding in batch
        if (finding.outcome is Outcome.PHANTOM and finding.id in digests)
        or (finding.outcome is Outcome.DIGEST_MISMATCH and digests.get(finding.id, b"") == finding.consumer_digest)
    }


def resend_missing(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Append what the consumer still doesn't know once more, under its id."""
    results = _consumed_since(work, batch)
    left = {Target(finding.id): finding for finding in batch if finding.id not in results}
    if not left:
        return results
    settings, request = work.job.producer.settings, work.request("resend", batch[0].outcome)
    with transaction(work.producer) as connection:
        messages = lock(connection, settings, request.act, list(left), wait=True)
        for target, finding in left.items():
            sent = messages[target].sends
            if not sent:
                results[finding.id] = "refused: the producer has no message of it any more"
            elif sent != finding.sends:
                results[finding.id] = HEALED  # resent meanwhile: the consumer hasn't read past that yet
            elif messages[target].state != "dispatched":
                results[finding.id] = f"refused: {STATES[messages[target].state or '']}"
            elif sent > work.job.max_resends:
                results[finding.id] = f"refused: resent {sent - 1} times already"
            else:
                results[finding.id] = DONE
        chosen = {target: messages[target] for target in left if results[target.message_id] == DONE}
        resend(ActRun(connection, settings, request, chosen))
    return results


def _consumed_since(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the results of what needs no resend, by what the consumer has now.

    A message that comes in between is sent once too often, which its inbox row makes harmless.
    """
    with transaction(work.consumer) as connection:
        (rows,) = execute(connection, work.statuses(batch))
        effects = work.effects(connection, batch)
    results = {message_id: "refused: it took effect" for message_id, number in effects.items() if number}
    return results | {message_id: HEALED for message_id, _ in rows}


def retry_parked(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Give the parked rows that are as they were found all of their attempts again.

    One that an operator retried and that is parked again is left to a human: it would go round for ever.
    """

    def result(finding: Finding, row: LockedRow | None) -> str:
        return row.result(finding) if row and row.status is Status.PARKED else HEALED

    with transaction(work.consumer) as connection:
        results = with_locked(work, connection, batch, result)
        targets = [Target(finding.id, work.pair.group) for finding in batch if results[finding.id] == DONE]
        apply(connection, work.job.consumer.settings, work.request("retry", batch[0].outcome), targets)
    return results


# --- the inbox contradicts the known facts: write the truth into it ----------------------------------------

_SENDS = "SELECT half_id, queue, position FROM {s}.message WHERE half_id = ANY (%(ids)s::uuid[])"

_INSERT_INBOX = """
INSERT INTO {s}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, body_digest,
                                  last_error)
SELECT %(group)s, id, %(topic)s, queue, position, %(status)s, %(attempts)s, digest, %(why)s
  FROM unnest(%(ids)s::uuid[], %(queues)s::int[], %(positions)s::bigint[], %(digests)s::bytea[])
       AS m (id, queue, position, digest)
 ORDER BY id
ON CONFLICT (consumer_group, message_id) DO NOTHING
RETURNING message_id
"""


def sync_status(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Write the truth where the row, or its absence, is as it was found and the effects still bear it out.

    The truth is `consumed` where the business table has exactly one row of the message and the producer stands by it,
    and `quarantined` where the producer has withdrawn it and it took no effect.

    A handler may be running this very message. What keeps the two apart:

    - There is an inbox row, to be retried: the consumer that runs its handler holds the row's lock from before the
      handler until the commit (a retry, and an ordered queue). While it does, the row is skipped here. While we hold
      it, no consumer begins; and afterwards the row isn't failed any more, so none does.
    - There is no row: a handler inserts it with its commit, and so do we; the primary key lets one of the two through.
      If we are first, the handler's insert waits for us and fails, and its business change is rolled back with it; the
      consumer reads the inbox again, and skips the message. (Its change isn't in our count: it isn't committed.) If the
      handler is first, our insert waits for it if need be and does nothing, and what the inbox says then is the result.
      Had both got through, the quarantine would stand over a message that took effect, or the effect would be there
      twice.
    - A parked row, or a quarantine: no consumer runs it. An operator's retry waits for our lock, and finds that it
      isn't parked any more.

    What the group has yet to read, or would read when it is created again, gets no row as consumed: it would never be
    handled. The group is neither deleted nor created while its rows are written.
    """
    results = _compensated_since(work, batch)
    left = [finding for finding in batch if finding.id not in results]
    sends: dict[UUID, list[tuple[int, int]]] = {finding.id: [] for finding in left}
    with transaction(work.producer) as connection:
        for half_id, queue, position in execute(connection, work.at_producer(_SENDS, left))[0]:
            sends[half_id].append((queue, position))
    schema, pair = work.job.consumer.schema, work.pair
    with transaction(work.consumer) as connection:
        group = take_lock(lock_key("group", schema, pair.group, pair.feed))
        reached: dict[int, int] = dict(execute(connection, group, positions(schema, pair)[0])[1])
        # Counted after the locks: an effect that came before them counts.
        effects = functools.cache(lambda: work.effects(connection, left))

        def result(each: Finding, row: LockedRow | None) -> str:
            return _result_of_sync(each, row, effects().get(each.id), _unread(sends[each.id], reached))

        results |= with_locked(work, connection, left, result)
        for truth in (Status.CONSUMED, Status.QUARANTINED):
            chosen = [finding for finding in left if results[finding.id] == DONE and truth_of(finding) is truth]
            results |= _write(work, connection, truth, chosen)
    return results


def truth_of(finding: Finding) -> Status:
    """Return the status that the inbox should have."""
    withdrawn = finding.compensated or (finding.state is not None and finding.state.withdrawn)
    return Status.QUARANTINED if withdrawn else Status.CONSUMED


def _compensated_since(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the results of what the producer has compensated since: its quarantine must not be released."""
    quarantined = [finding for finding in batch if finding.status is InboxState.QUARANTINED]
    if not quarantined:
        return {}
    with transaction(work.producer) as connection:
        (rows,) = execute(connection, compensated(work.job.producer.schema, ids_of(quarantined)))
    return dict.fromkeys((half_id for (half_id,) in rows), "refused: it was compensated")


def _result_of_sync(finding: Finding, row: LockedRow | None, effects: int | None, unread: str) -> str:
    """Decide what is to be done about a message; ``effects`` is None where no business table is named.

    ``unread`` is why it may get no row as consumed, or `DONE`.
    """
    truth = truth_of(finding)
    if row is not None and row.status is truth:
        return HEALED
    if truth is Status.CONSUMED and row is not None and row.took_effect and row.status.reread:
        return "refused: the group reads it again: it took effect in an earlier passage"
    if truth is Status.CONSUMED and effects != 1:
        return "refused: no business table is named" if effects is None else f"refused: it took effect {effects} times"
    if truth is Status.QUARANTINED and effects:
        return "refused: it took effect"
    if row is not None:
        return row.result(finding)
    expected = unread if truth is Status.CONSUMED else DONE
    return "refused: its inbox row is gone" if finding.status else expected


def _unread(sends: Sequence[tuple[int, int]], reached: Mapping[int, int]) -> str:
    """Return `DONE` if a group has read one of the sends of a message, or it has none yet; else why it gets no row."""
    if any(position <= reached.get(queue, -1) for queue, position in sends) or (reached and not sends):
        return DONE
    return "refused: the group has no offset at or beyond it: it would come to it later, and never handle it"


def _write(work: Work, connection: Connection, truth: Status, chosen: Sequence[Finding]) -> dict[UUID, str]:
    """Insert or update the rows of ``chosen``, and record it; return the results of those that came too late."""
    # Without a status the inbox had no row of it when it was found.
    missing = [finding for finding in chosen if not finding.status]
    there = [finding for finding in chosen if finding.status]
    why = f"quarantined by {work.reason(chosen[0].outcome)}" if chosen and truth is Status.QUARANTINED else None
    # Queue and position are 0 where there is no message.
    rows = {
        "topic": work.pair.feed,
        "status": truth.value,
        "why": why,
        "attempts": 1 if truth is Status.CONSUMED else 0,
        "queues": [finding.queue or 0 for finding in missing],
        "positions": [finding.position or 0 for finding in missing],
        "digests": [finding.producer_digest for finding in missing],
    }
    inserted, _, now = execute(
        connection,
        work.at_consumer(_INSERT_INBOX, missing, **rows),
        work.settle(there, truth, why),
        work.statuses(missing),
    )
    status: dict[UUID, str] = dict(now)
    late = {
        each: HEALED if status.get(each) == truth else f"refused: it is {status.get(each)} now"
        for each in {finding.id for finding in missing} - {message_id for (message_id,) in inserted}
    }
    done = [finding for finding in chosen if finding.id not in late]
    changes = {each: {"was": each.status.name.lower() if each.status else None, "is": truth.value} for each in done}
    execute(connection, *work.audits(Repair.SYNC_STATUS, changes))
    return late


# --- the producer believes something else than the consumer says ------------------------------------------


def sync_opinion(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Write what the consumer says into the rows of the producer's table that are as they were found.

    The consumer is asked first, in a transaction of its own: what it says now is compared with what it said. A row that
    the producer has changed meanwhile is left alone, and one that another transaction has is `BUSY`. The audit is in
    another database, and is committed first: where a repair is killed in between, it tells of an act that isn't done,
    and the next run does it; none goes untold.
    """
    job, pair, table = work.job, work.pair, cast("ForeignTable", work.job.producer_table)
    results, left, words = _word_since(work, batch), dict[str, list[Finding]](), table.written
    for finding in (each for each in batch if each.id not in results):
        status = _named(finding.status)
        if (word := words.get(status)) is None:
            results[finding.id] = f"refused: opinions has no word that stands for {status}; give it one"
        elif table.state_of(word) not in {None, finding.state}:
            results[finding.id] = f"refused: the word {word} tells another state of it, too"
        else:
            left.setdefault(word, []).append(finding)
    with transaction(work.producer) as connection:
        known = known_table(connection, job.producer, "producer", table)
        locked = {id_ for (id_,) in execute(connection, known.lock(pair, list(chain(*left.values()))))[0]}
        changes: dict[Finding, object] = {}
        for word, found in left.items():
            free = [each for each in found if each.id in locked]
            done = {id_ for (id_,) in execute(connection, known.write_opinion(pair, word, free))[0]}
            opinions = _opinions(known, connection, pair, [each for each in found if each.id not in done])
            for each in found:
                results[each.id] = _written(each) if each.id in done else _changed(each, opinions.get(each.id))
                if each.id in opinions and each.id not in locked:
                    results[each.id] = BUSY
            changes |= {
                each: {"row": each.name, "was": _named(each.opinion), "is": word} for each in found if each.id in done
            }
        if changes:
            with connected(job.recorder) as recorder:
                execute(recorder, *work.audits(Repair.SYNC_OPINION, changes, job.recorder.schema))
    return results


def _word_since(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the results of messages of which the consumer says something else by now."""
    if "consumer" in work.job.by_spark:
        return {}  # it was read as a whole, and would be once more for each batch
    rows = side_of(work.job, work.pair, "consumer").read([Range.only(each.id) for each in batch])
    now = dict(zip(to_uuids(rows), map(InboxState, rows["status"].to_pylist()), strict=True))
    return {
        each.id: f"refused: the consumer says {_named(now.get(each.id))} by now; run the reconciliation again"
        for each in batch
        if _named(now.get(each.id)) != _named(each.status)
    }


def _named(status: InboxState | None) -> str:
    return (status or InboxState.NONE).name.lower()


def _opinions(known: KnownTable, connection: Connection, pair: Pair, found: Sequence[Finding]) -> dict[UUID, int]:
    """Return what the producer's table says now of messages that it has."""
    if not found:
        return {}
    (rows,) = execute(connection, known.rows_within(pair, [Range.only(each.id) for each in found]))
    index = 1 + [column.name for column in PRODUCER_COLUMNS].index("opinion")  # after the id as people read it
    return {row[0]: row[index] for row in rows}


def _written(finding: Finding) -> str:
    # What the producer believes is right now; a status that is a kind of difference itself stays one.
    status = _named(finding.status)
    return f"written, and the message is {status} all the same" if status in LABELED else DONE


def _changed(finding: Finding, opinion: int | None) -> str:
    if opinion is None:
        return "refused: the producer has no row of it any more"
    healed = opinion == (finding.status or InboxState.NONE)
    return HEALED if healed else "refused: the producer has changed it meanwhile; run the reconciliation again"


_ACTS: Mapping[Repair, Repairer] = {
    Repair.RESEND: resend_missing,
    Repair.DISPATCH: dispatch_undispatched,
    Repair.SYNC_STATUS: sync_status,
    Repair.PARK: park,
    Repair.RETRY: retry_parked,
    Repair.CHECK: check_undecided,
    Repair.SYNC_OPINION: sync_opinion,
}
