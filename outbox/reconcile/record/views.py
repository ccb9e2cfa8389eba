"""What operators see of reconciliations: runs, their findings and sums, one finding with both sides, timetables.

Commands, endpoints and pages show it as it is. Nothing here needs a library of the extra: a process that only shows
what was found compares nothing.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from outbox.acts.changes import LONGEST
from outbox.database.execute import execute
from outbox.errors import DatabaseUnreached, InvalidRequest, InvalidSettings, NotFound
from outbox.operator.databases import Database, Databases, OverDatabases, Query
from outbox.operator.health.workers import HandlerRow, merged, workers_in
from outbox.operator.look.paging import After, Part, SortOrder, checked, page_of
from outbox.operator.model import Page, PageRequest
from outbox.reader import option
from outbox.reconcile.job import DONE, HEALED, KINDS, LABELED, Outcome, Repair
from outbox.reconcile.record.timetable import HEARD_OF, LOST_AFTER, Reconciliation, Timetable, compared, last_scheduled
from outbox.text import MASK, without

if TYPE_CHECKING:
    from sqlalchemy import Connection

_LABELS = list(LABELED)


class RunState(enum.StrEnum):
    """How a run went; ``unended``: it has had no end for so long that its process must have died."""

    RUNNING = "running"
    UNENDED = "unended"
    FAILED = "failed"
    DIFFERENT = "different"
    IN_SYNC = "in_sync"


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Select runs; a field left out fits all."""

    database: str | None = option(None, "Only of this database.", most=LONGEST, metavar="NAME")
    topic: str | None = option(None, "Only this topic.", most=LONGEST)
    group: str | None = option(None, "Only this group.", most=LONGEST, metavar="NAME")
    schedule: str | None = option(None, "Only runs by this timetable.", most=LONGEST, metavar="NAME")
    state: RunState | None = option(None, "Only runs of this state.")


@dataclass(frozen=True, slots=True)
class Run:
    """A pair of topic and group, compared; the runs of one job have its ``job_id``.

    ``counts`` are by outcome, ``differences`` is how many of them are differences, ``left`` how many of these are
    neither repaired nor healed (counted as far as `MOST_LEFT`): None before there is a result. ``heard_of`` is when its
    process last said that it is at work: one that hasn't for long, and has no end, has died.
    ``applied``: the run itself repaired. ``measures`` are the sums of business tables, as the JSON report has them; a
    list of runs has only their totals. ``plan`` says how it was compared, and why so. ``seconds`` is how long it took.
    ``ordered_by`` is the operator that ordered the run, ``schedule`` the timetable by which it began.
    """

    columns: ClassVar[str] = (
        "run=id topic group since=window_start until=window_end started=started_at took> "
        "repairs=applied schedule result"
    )
    database: str
    id: UUID
    job_id: UUID
    topic: str
    group: str
    state: str
    window_start: dt.datetime | None
    window_end: dt.datetime | None
    started_at: dt.datetime
    heard_of: dt.datetime
    finished_at: dt.datetime | None
    seconds: float | None
    applied: bool
    counts: dict[str, int] | None
    differences: int | None
    left: int | None
    measures: list[dict[str, Any]]
    plan: dict[str, Any] | None
    error: str | None
    schedule: str | None
    ordered_by: str | None

    @property
    def title(self) -> str:
        """What it compares, for people."""
        return compared(self.topic, self.group)

    @property
    def kinds(self) -> dict[Outcome, int]:
        """How many differences there are of each kind, gravest first."""
        counts = self.counts or {}
        return {kind: counts[kind.label] for kind in KINDS if counts.get(kind.label)}


@dataclass(frozen=True, slots=True)
class KindOfRun:
    """The differences of one kind in a run: their meaning, their repair, and its results.

    ``action`` is the repair that the policy of the run has for them, and ``does`` what that does to a message;
    ``repairs`` are those that there are. ``refused`` were tried in vain, ``why`` says so of one of them. ``left`` are
    neither repaired nor healed. ``by_hand`` is what a human does.
    """

    kind: str
    meaning: str
    number: int
    action: str
    does: str
    repairs: list[str]
    done: int
    healed: int
    refused: int
    why: str | None
    left: int
    by_hand: str


@dataclass(frozen=True, slots=True)
class RunView:
    """A run, and its differences by kind, gravest first."""

    run: Run
    kinds: list[KindOfRun]


@dataclass(frozen=True, slots=True)
class FindingFilter:
    """Which findings of a run."""

    kind: str | None = option(None, f"Only of this kind: {', '.join(_LABELS)}.", most=LONGEST, metavar="KIND")
    left: bool = option(False, "Only findings that are neither repaired nor healed.")
    after: int = option(0, "Only findings behind the one of this number.", least=0, most=2**63 - 1, metavar="N")


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A difference; ``detail`` is what either side said of the message, without what it didn't say.

    ``id`` is its number. ``action`` is what the policy of the run does about it, ``result`` what came of that: None as
    long as it wasn't tried.
    """

    id: int
    message_id: UUID
    kind: str
    detail: dict[str, Any]
    action: str
    result: str | None
    acted_at: dt.datetime | None


@dataclass(frozen=True, slots=True)
class FindingView:
    """A difference with both sides as they were found: ``producer`` and ``consumer`` have the names of ``detail``.

    ``meaning`` says what its kind is, ``by_hand`` what a human does about it, ``repairs`` what can be done, and what
    each does.
    """

    run: Run
    finding: FindingRow
    producer: dict[str, Any]
    consumer: dict[str, Any]
    meaning: str
    by_hand: str
    repairs: dict[str, str]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A reconciliation that workers have declared, by its timetable.

    ``pairs`` are the topics and groups that it compares, ``*`` and ``*`` for those of a ``fleet``, which is its file:
    none where no living worker with the role ``reconcile`` has it. ``next_at`` is when it is due, None where that isn't
    known. ``last`` are the runs of its newest job. One that ``follows`` the log has no end, and so many seconds between
    its passes.
    """

    database: str
    name: str
    cron: str | None
    every: float | None
    timezone: str
    pairs: list[tuple[str, str]]
    workers: list[str]
    last: list[Run]
    next_at: dt.datetime | None
    fleet: str | None = None
    follows: float | None = None

    @property
    def compares(self) -> list[str]:
        """What it compares, for people."""
        if self.fleet is not None:
            return [f"fleet {self.fleet}"] if self.pairs else []
        return [compared(*pair) for pair in self.pairs]


#: What of a finding the producer said, and what the consumer.
_PRODUCER = ("state", "sends", "queue", "position", "at", "compensated", "opinion", "torn")
_CONSUMER = ("status", "attempts", "received_at", "changed_at", "effects")

_NEWEST: SortOrder[Run] = SortOrder(key=lambda run: (run.started_at, run.id), shape=(dt.datetime, UUID))
_BY_NUMBER: SortOrder[FindingRow] = SortOrder(key=lambda row: (row.id,), shape=(int,), newest_first=False)

#: What nothing is left to do about.
SETTLED = f"result IN ('{DONE}', '{HEALED}')"
#: So far it is counted in a list of runs what is left of each.
MOST_LEFT = 1_000

_ROWS = """
-- id job_id topic group state window_start window_end started_at heard_of finished_at seconds applied counts:json \
differences left measures:json plan:json error schedule ordered_by
SELECT id, job_id, topic, consumer_group, state, window_start, window_end, started_at, heard_of, finished_at,
       extract(epoch FROM finished_at - started_at)::float8, applied, counts::text, differences,
       CASE WHEN counts IS NOT NULL THEN least({most_left}, coalesce((plan ->> 'left_out')::int8, 0) + (
            SELECT count(*) FROM (SELECT FROM {{s}}.reconciliation_finding f
                                   WHERE f.run_id = r.id AND {settled} IS NOT TRUE LIMIT {most_left}) f)) END,
       {measures}::text,
       nullif(plan - {hidden}, jsonb_build_object())::text, error, schedule, ordered_by
  FROM (SELECT r.*, {heard_of} AS heard_of, d.differences,
               CASE WHEN r.finished_at IS NULL AND {heard_of} < clock_timestamp() - make_interval(secs => {lost})
                    THEN 'unended'
                    WHEN r.finished_at IS NULL THEN 'running'
                    WHEN r.error IS NOT NULL THEN 'failed'
                    WHEN d.differences > 0 OR r.measures @> '[{{"in_sync": false}}]' THEN 'different'
                    ELSE 'in_sync' END AS state
          FROM {{s}}.reconciliation_run r
         CROSS JOIN LATERAL (SELECT CASE WHEN r.counts IS NOT NULL THEN coalesce(sum(value::int8), 0)::int8 END
                               FROM jsonb_each_text(r.counts) WHERE key = ANY (%(kinds)s::text[])) d (differences)) r"""
# What says that a run is at work, and how far a follower has come.
_HIDDEN = "ARRAY['alive_at', 'state', 'passes', 'holder', 'leased_until', 'due_at']"
_TOTALS = "(SELECT jsonb_agg(m - 'rows') FROM jsonb_array_elements(measures) m)"
_LISTED, _WHOLE = (
    _ROWS.format(
        hidden=_HIDDEN, measures=measures, lost=LOST_AFTER, heard_of=HEARD_OF, settled=SETTLED, most_left=MOST_LEFT
    )
    for measures in (_TOTALS, "measures")
)

_RUNS = Query(f"""{_LISTED}
 WHERE (%(topic)s::text IS NULL OR topic = %(topic)s) AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
   AND (%(schedule)s::text IS NULL OR schedule = %(schedule)s) AND (%(state)s::text IS NULL OR state = %(state)s)
   AND (%(at)s::timestamptz IS NULL OR (started_at, id) < (%(at)s::timestamptz, %(after)s::uuid))
 ORDER BY started_at DESC, id DESC LIMIT %(limit)s
""")

_RUN = Query(f"{_WHOLE}\n WHERE id = %(id)s")

# One that was lost, and begun again, has several runs of a pair.
_NEWEST_JOB = Query(f"""{_LISTED}
 WHERE id IN (
    SELECT DISTINCT ON (topic, consumer_group) id FROM {{s}}.reconciliation_run
     WHERE job_id = (SELECT job_id FROM {{s}}.reconciliation_run WHERE schedule = %(schedule)s
                        AND (topic, consumer_group) = ANY (SELECT * FROM unnest(%(topics)s::text[], %(groups)s::text[]))
                      ORDER BY started_at DESC LIMIT 1)
     ORDER BY topic, consumer_group, started_at DESC)
 ORDER BY topic, consumer_group
""")

_BY_KIND = Query(f"""
-- kind action number done healed refused why
SELECT kind, coalesce(action, 'alert'), count(*), count(*) FILTER (WHERE result = '{DONE}'),
       count(*) FILTER (WHERE result = '{HEALED}'), count(*) FILTER (WHERE NOT {SETTLED}),
       min(result) FILTER (WHERE NOT {SETTLED})
  FROM {{s}}.reconciliation_finding WHERE run_id = %(run)s
 GROUP BY 1, 2
""")

_COLUMNS = """
-- id message_id kind detail:json action result acted_at
SELECT id, message_id, kind, coalesce(detail, jsonb_build_object())::text, coalesce(action, 'alert'), result, acted_at
  FROM {s}.reconciliation_finding
 WHERE run_id = %(run)s AND message_id IS NOT NULL"""

_FINDINGS = Query(f"""{_COLUMNS} AND id > %(after)s
   AND (%(kind)s::text IS NULL OR kind = %(kind)s)
   AND (NOT %(left)s OR {SETTLED} IS NOT TRUE)
 ORDER BY id LIMIT %(limit)s
""")

_FINDING = Query(f"{_COLUMNS} AND message_id = %(message)s LIMIT 1")


class Reconciliations(OverDatabases):
    """What an operator sees of reconciliations, in the consumers' databases; ``redactor`` masks the keys of sums.

    Raises (all of its methods):
        InvalidRequest: a filter or token that isn't one.
        UnknownDatabase: no database of the name that a filter names.
        sqlalchemy.exc.DBAPIError: a database can't be reached, or a statement took too long.
    """

    def runs(self, criteria: RunFilter, page: PageRequest) -> Page[Run]:
        """Return a page of the runs that fit, the newest first: each compared a topic with a group."""

        def read(connection: Connection, database: Database, after: After, limit: int) -> Part[Run]:
            at, run_id = after or (None, None)
            values: dict[str, Any] = {"topic": criteria.topic, "group": criteria.group, "schedule": criteria.schedule}
            values |= {"state": criteria.state, "at": at, "after": run_id, "limit": limit}
            return Part(self._read_runs(connection, database, _RUNS, **values))

        return page_of(self.databases, "consumer", checked(criteria), page, _NEWEST, read, ("runs", criteria))

    def run(self, run_id: UUID) -> RunView:
        """Return a run with the sums of its measures, and its differences by kind.

        Raises:
            NotFound: no registered database has it.
            DatabaseUnreached: none of those that can be reached has it.
        """
        database, run = self._find(run_id)
        with database.read_only() as connection:
            rows = _BY_KIND.read(connection, database.schema, run=run_id)
        found = [_kind_of_run(LABELED[row.pop("kind")], run, **row) for row in rows if row["kind"] in LABELED]
        found.sort(key=lambda each: _LABELS.index(each.kind))
        return self.shown_texts(RunView(run, found))

    def findings(self, run_id: UUID, criteria: FindingFilter, page: PageRequest) -> Page[FindingRow]:
        """Return a page of the findings of a run that fit: the facts of either side about each message, and its repair.

        Raises:
            NotFound: no registered database has the run.
            InvalidRequest: no such kind.
        """
        if checked(criteria).kind not in {None, *_LABELS}:
            raise InvalidRequest(f"kind {criteria.kind!r} must be one of: {', '.join(_LABELS)}", field="kind")
        database, _ = self._find(run_id)

        def read(connection: Connection, database: Database, after: After, limit: int) -> Part[FindingRow]:
            behind = after[0] if after else criteria.after
            values: dict[str, Any] = {"run": run_id, "kind": criteria.kind, "left": criteria.left, "after": behind}
            rows = _FINDINGS.read(connection, database.schema, **values, limit=limit)
            return Part([FindingRow(**row) for row in rows])

        one, context = Databases([database]), ("findings", run_id, criteria)
        return self.shown_texts(page_of(one, None, None, page, _BY_NUMBER, read, context))

    def finding(self, run_id: UUID, message_id: UUID) -> FindingView:
        """Return what a run found of a message: both sides as they were, what it means, and what can be done.

        Raises:
            NotFound: there is no such run, or it found nothing of the message.
        """
        database, run = self._find(run_id)
        with database.read_only() as connection:
            rows = _FINDING.read(connection, database.schema, run=run_id, message=message_id)
        if not rows or rows[0]["kind"] not in LABELED:
            raise NotFound(f"run {run_id} found no difference in message {message_id}, or it was pruned")
        row = FindingRow(**rows[0])
        kind = LABELED[row.kind]
        producer, consumer = ({name: _fact(row, name) for name in names} for names in (_PRODUCER, _CONSUMER))
        by_hand, repairs = kind.by_hand(_foreign(run)), {each.value: each.does for each in _repairs(kind, run)}
        return self.shown_texts(FindingView(run, row, producer, consumer, kind.meaning, by_hand, repairs))

    def schedules(self) -> list[Schedule]:
        """Return the reconciliations that living workers have declared: when they run, what they compare.

        They are in the order of databases and names.

        Raises:
            DatabaseUnreached: a database can't be reached.
        """
        if self.databases.away:
            raise DatabaseUnreached(list(self.databases.away))
        found: list[Schedule] = []
        for database in self.databases.having("consumer"):
            with database.read_only() as connection:
                found += self._schedules_in(connection, database)
        return found

    def _schedules_in(self, connection: Connection, database: Database) -> list[Schedule]:
        declared = _with_pairs(merged(workers_in(connection, database)))
        return [self._schedule(connection, database, row) for row in declared]

    def _schedule(self, connection: Connection, database: Database, row: HandlerRow) -> Schedule:
        cron, every = row.options.get("cron"), row.options.get("every")
        zone, pairs = str(row.options.get("timezone", "UTC")), [tuple(pair) for pair in row.options.get("pairs", ())]
        fleet, follows = row.options.get("fleet"), row.options.get("follows")
        schedule = Schedule(database.name, row.name, cron, every, zone, pairs, row.workers, [], None, fleet, follows)
        if not pairs:
            return schedule
        topics, groups = map(list, zip(*pairs, strict=True))
        values = {"schedule": row.name, "topics": topics, "groups": groups}
        runs = self._read_runs(connection, database, _NEWEST_JOB, **values)
        last = last_scheduled(connection, database.schema, row.name, pairs)
        try:
            due_in = Timetable(Reconciliation(row.name, cron=cron, every=every, timezone=zone)).due_in(last)
        except InvalidSettings:  # a worker of another version
            return replace(schedule, last=runs)
        return replace(schedule, last=runs, next_at=last.now + dt.timedelta(seconds=max(0.0, due_in)))

    def _find(self, run_id: UUID) -> tuple[Database, Run]:
        def find(database: Database) -> tuple[Database, Run] | None:
            with database.read_only() as connection:
                return next(((database, run) for run in self._read_runs(connection, database, _RUN, id=run_id)), None)

        which = f"no registered database ({', '.join(self.databases)})"
        return self.first_of("consumer", find, NotFound(f"{which} has run {run_id}, or it was pruned"))

    def _read_runs(self, connection: Connection, database: Database, query: Query, **values: object) -> list[Run]:
        (rows,) = execute(connection, query(database.schema, kinds=_LABELS, **values))
        runs = [Run(database=database.name, **row | {"measures": row["measures"] or []}) for row in query.named(rows)]
        return [
            replace(run, error=self.shown(run.error), measures=[self._masked(each) for each in run.measures])
            for run in runs
        ]

    def _masked(self, measure: Mapping[str, Any]) -> dict[str, Any]:
        """Return a measure with the parts of its keys masked that stand under telling names, as in bodies."""
        names, secrets = list(measure.get("by", ())), set[str]()
        hides = self.redactor.hides_header

        def shown(row: Mapping[str, Any]) -> dict[str, Any]:
            pairs = list(zip(names, row["key"], strict=False))
            secrets.update(part for name, part in pairs if part is not None and hides(name, part))
            return {**row, "key": [MASK if part is not None and hides(name, part) else part for name, part in pairs]}

        rows = [shown(row) for row in measure.get("rows", ())]
        # In the order of the keys, sums would tell which key is the greater one.
        is_masked = any(MASK in row["key"] for row in rows)
        faults = [without(fault, secrets) for fault in measure.get("faults", ())]
        return {
            **measure,
            "faults": faults,
            "rows": sorted(rows, key=lambda row: Decimal(row["producer"])) if is_masked else rows,
        }


def _fact(row: FindingRow, name: str) -> Any:
    value: Any = row.detail.get(name)
    is_time = name in {"at", "received_at", "changed_at"} and isinstance(value, str)
    return dt.datetime.fromisoformat(value) if is_time else value


def _foreign(run: Run) -> Sequence[str]:
    """Return the sides of a run whose tables aren't ours."""
    return (run.plan or {}).get("foreign") or ()


def _repairs(kind: Outcome, run: Run) -> list[Repair]:
    """Return what can be done about a kind of a run: nothing in tables that aren't ours."""
    return [] if _foreign(run) else [each for each in kind.repairs if each is not Repair.ALERT]


def _kind_of_run(kind: Outcome, run: Run, *, action: str, **counts: Any) -> KindOfRun:
    # Not all of them may be listed. A run that failed has counted none.
    counts["number"] = max(counts["number"], run.kinds.get(kind, 0))
    repairs = [each.value for each in _repairs(kind, run)]
    does = Repair(action).does if action in set(Repair) else action
    return KindOfRun(
        kind=kind.label,
        meaning=kind.meaning,
        by_hand=kind.by_hand(_foreign(run)),
        action=action,
        does=does,
        repairs=repairs,
        left=counts["number"] - counts["done"] - counts["healed"],
        **counts,
    )


def _with_pairs(handlers: Iterable[HandlerRow]) -> list[HandlerRow]:
    """Return the reconciliations that say what they compare; one of a name that none says it of, once."""
    rows = [row for row in handlers if row.kind == "reconciliation"]
    saying = {row.name for row in rows if row.options.get("pairs")}
    first = {row.name: row for row in reversed(rows) if row.name not in saying}
    return sorted([row for row in rows if row.options.get("pairs")] + list(first.values()), key=lambda row: row.name)
