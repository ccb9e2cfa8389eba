"""The report as one JSON object: names that stay, decimals and ids as strings, times in ISO 8601 and UTC.

``version`` grows when a name goes or changes its meaning; new names may come at any time.

    version, begun_at, seconds, applied         of the job; ``applied``: with repairs
    in_sync, verdict, differences, left         ``left`` are neither repaired nor healed by the end of the run
    pairs[]
      topic, group, run_id, begun_at, in_sync
      window      {since, until, grace}         null is no bound; grace in seconds
      plan        {tier, engine, why[], ranges, buckets, differing, settled, rows_read,
                   standby_lag: {side: seconds}, foreign: [side], writable, doubts[], expected,
                   came: {rows, bytes, seconds}}
                                                what it was to cost, and what it did until the second look; doubts
                                                say what can't be true
      counts      {outcome: number}             every outcome, also those that are 0
      healed                                    differences that were gone at the second look
      differences[]  {kind, number, left, meaning, mend, action, done, healed, refused: {reason: number}}
      lag         {bounds[], counts[], total, sampled, p50, p90, p99} or null
                                                seconds; a percentile is the bound below it, null beyond the last one
       findings[]  {id, kind, sentence, since, state, sends, queue, position, at, compensated, opinion, torn,
                    status, attempts, received_at, changed_at, effects, foreign_id}
      findings_left_out                         how many a limit, or max_findings, kept out of ``findings``
      left_out                                  how many max_findings kept out of findings, record and repairs
      backlog     {queue: number}               messages beyond the group's offset
      repairs[]   {id, kind, action, result}    result: ``done``, ``healed``, or why it was refused
      repairs_left_out
      seconds     {stage: seconds}
    measures[]
      name, topic, group, by[], in_sync         everything adds up, and could be read
      faults[]                                  sentences about what couldn't be read
      totals[]    {key[] (null is NULL), value, producer, rolled_back, consumer, in_flight, unexplained}
      rows[]      the same, for each key
      rows_left_out

The other forms show parts of the same: what it says of a kind of difference, of one finding, and in all.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.destination import Destination, whole_at
from outbox.reader import plain as as_plain
from outbox.reconcile.job import DONE, HEALED, KINDS, Outcome, Repair, counts_as_json
from outbox.reconcile.measure.result import EXACT, MeasureResult, MeasureRow
from outbox.reconcile.rows import (
    DIGESTS,
    FINDING,
    NUMBERS,
    ComparisonPlan,
    Estimate,
    Finding,
    JobResult,
    Lag,
    PairResult,
    Repaired,
    to_findings,
    to_uuids,
)
from outbox.reconcile.tables import InboxState, ProducerState, Torn
from outbox.text import counted, duration, fields_of, key_text, plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


def sentence_of(finding: Finding, now: dt.datetime) -> str:
    """Return the facts about one message at ``now``, the time of the comparison, in a sentence without its kind."""
    parts = [_producer(finding, now), _consumer(finding, now)]
    if finding.outcome is Outcome.DIGEST_MISMATCH:
        parts.append("the bodies differ")
    return "; ".join(parts)


_TORN = {
    Torn.MESSAGE_WITHOUT_HALF: "a message without a half message",
    Torn.OP_WITHOUT_HALF: "an op without a half message",
    Torn.MESSAGE_THOUGH_ROLLED_BACK: "and yet a message",
    Torn.MESSAGE_THOUGH_UNDECIDED: "and yet a message",
    Torn.MESSAGE_IN_OTHER_TOPIC: "a message of another topic than its half message",
}


def _producer(finding: Finding, now: dt.datetime) -> str:
    if finding.state is None:
        return "the producer doesn't know it"
    state = finding.state.name.lower().replace("_", " ")
    parts = [state]
    if finding.state is ProducerState.DISPATCHED:
        parts = [f"{state} at queue {finding.queue}", f"position {finding.position}"]
        if finding.sends and finding.sends > 1:
            parts.append(counted(finding.sends, "send"))
    if finding.torn:
        parts.append(_TORN[finding.torn])
    if finding.compensated:
        parts.append("compensated")
    if finding.opinion is not None:
        parts.append(f"holds it for {finding.opinion.name.lower() if finding.opinion else 'unknown to the consumer'}")
    return ", ".join([*parts, *_when(finding.at, now)])


def _consumer(finding: Finding, now: dt.datetime) -> str:
    if not finding.status:
        parts = ["the inbox doesn't know it"]
    else:
        parts = [f"the inbox says {finding.status.name.lower().replace('_', ' ')}"]
        if finding.status is not InboxState.QUARANTINED and finding.attempts is not None:
            parts.append(counted(finding.attempts, "attempt"))
        parts += _when(finding.changed_at, now)
    if finding.effects is not None:
        parts.append(f"{counted(finding.effects, 'row')} in the business table")
    return ", ".join(parts)


def _when(moment: dt.datetime | None, now: dt.datetime) -> list[str]:
    if moment is None:
        return []
    seconds = (now - moment).total_seconds()
    return [f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}"]


#: Returns a decimal for people, with all of its digits: ``-1,234.50``.
amount: Callable[[Decimal], str] = "{:,f}".format


def bound(seconds: float) -> str:
    """Return a bound of the lag histogram: ``30 ms``, ``10 s``, ``5 min``, ``1 h``."""
    if seconds < 1:
        return f"{seconds * 1000:g} ms"
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


@dataclass(frozen=True, slots=True)
class KindSummary:
    """Count the differences of one kind, with their repair, and its results.

    ``tried``: repairs were to be done. ``refused`` counts by reason.
    """

    kind: Outcome
    number: int
    action: Repair
    mend: str
    tried: bool
    done: int
    healed: int
    refused: Counter[str]

    @property
    def left(self) -> int:
        """How many are neither repaired nor healed."""
        return max(0, self.number - self.done - self.healed)

    @property
    def repair(self) -> str:
        """Name the repair that was done, or would be done, in a few words."""
        if self.action is Repair.ALERT:
            return ""
        if not self.tried:
            return f"--apply: {self.action.value}"
        parts = []
        if self.done:
            parts.append(f"{self.done:,} repaired ({self.action.value})")
        if self.healed:
            parts.append(f"{self.healed:,} healed meanwhile")
        if self.refused:
            reasons = [f"{reason} ({number:,})" for reason, number in self.refused.most_common(3)]
            if more := len(self.refused) - len(reasons):
                reasons.append(f"and {counted(more, 'other reason')}")
            parts.append(f"{self.refused.total():,} refused: {'; '.join(reasons)}")
        return ", ".join(parts) or "not tried"


def kinds(pair: PairResult, result: JobResult) -> list[KindSummary]:
    """Return the differences of a pair by kind, gravest first; of several repairs of a message the last counts."""
    results: dict[Outcome, Counter[str]] = {kind: Counter() for kind in pair.differences}
    for repaired in {repaired.id: repaired for repaired in pair.repairs}.values():
        # A database's error has several lines.
        reason = " ".join(repaired.result.removeprefix("refused: ").split())
        results.setdefault(repaired.kind, Counter())[reason] += 1
    summaries = []
    for kind, number in pair.differences.items():
        done, healed = results[kind].pop(DONE, 0), results[kind].pop(HEALED, 0)
        foreign, writable = pair.plan.foreign, pair.plan.writable
        action, text = kind.repair(result.policy, foreign), kind.mend(result.policy, foreign, writable=writable)
        summaries.append(KindSummary(kind, number, action, text, result.applied, done, healed, results[kind]))
    return summaries


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a job comes to. ``measures`` are texts about those that don't add up."""

    differences: int
    left: int
    measures: tuple[str, ...]

    @property
    def in_sync(self) -> bool:
        """Was no difference found, and nothing unexplained?"""
        return not (self.differences or self.measures)

    @property
    def sentence(self) -> str:
        """The verdict for people: ``in sync``, ``7 differences left; bank: 1.50 amount unexplained``."""
        return "; ".join(self.texts)

    @property
    def texts(self) -> tuple[str, ...]:
        """The parts of the sentence, at least one."""
        if not self.differences:
            return self.measures or ("in sync",)
        found = f"{counted(self.left, 'difference')} left"
        if self.left < self.differences:
            found += f", {self.differences - self.left:,} of {self.differences:,} repaired"
        return (found, *self.measures)


def verdict(result: JobResult) -> Verdict:
    """Return what a job comes to."""
    summaries = [kind for pair in result.pairs for kind in kinds(pair, result)]
    texts = tuple(text for measure in result.measures for text in _unexplained(measure))
    return Verdict(sum(kind.number for kind in summaries), sum(kind.left for kind in summaries), texts)


def _unexplained(measure: MeasureResult) -> Iterable[str]:
    amounts = [
        f"{amount(unexplained(rows))} {' '.join(filter(None, [value, key_text(currency)]))}"
        for (value, currency), rows in measure.by_currency(measure.unexplained).items()
    ]
    if amounts:
        yield f"{measure.name}: {', '.join(amounts)} unexplained"
    if measure.faults:
        yield f"{measure.name}: {counted(len(measure.faults), 'fault')}"


def unexplained(rows: Iterable[MeasureRow]) -> Decimal:
    """Return how much isn't explained in all.

    Absolute values are added: what is too much under one key doesn't explain what is missing under another.
    """
    return reduce(EXACT.add, (row.unexplained.copy_abs() for row in rows), Decimal())


# --- the document ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairReport:
    """What a report says of a pair: its kinds of differences, and as many findings and repairs as are shown."""

    result: PairResult
    kinds: list[KindSummary]
    findings: list[Finding]
    repairs: list[Repaired]

    @property
    def lag(self) -> str:
        """The percentiles of the lag in a sentence; empty if none was measured."""
        lag = self.result.lag
        if lag is None or not lag.total:
            return ""
        texts = []
        for share in (0.5, 0.9, 0.99):
            within = lag.within(share)
            limit = f"over {bound(lag.bounds[-1])}" if within is None else f"within {bound(within)}"
            texts.append(f"{share:.0%} {limit}")
        return f"{', '.join(texts)} ({'a sample of ' if lag.sampled else ''}{counted(lag.total, 'message')})"


def listed_of(pair: PairResult) -> str:
    """Return in a sentence how many differences of a pair are listed; empty if all are."""
    if not pair.left_out:
        return ""
    every = pair.left_out + pair.findings.num_rows
    return (
        f"{pair.findings.num_rows:,} of {every:,} differences are listed; {pair.left_out:,} are left out (max_findings)"
    )


def cost_of(plan: ComparisonPlan) -> str:
    """Return in a sentence what a comparison was expected to cost, and what it did; empty if that isn't known."""
    if plan.expected is None:
        return ""
    came = f"; it came to {_estimate(plan.came)}" if plan.came else ""
    return f"expected {_estimate(plan.expected)}{came}"


def _estimate(estimate: Estimate) -> str:
    return f"{counted(estimate.rows, 'row')}, {estimate.bytes / 1e6:,.1f} MB, {duration(estimate.seconds)}"


def backlog_of(pair: PairResult) -> str:
    """Return in a sentence what of a pair lies beyond the group's offset, by queue; empty if nothing does."""
    if not pair.backlog:
        return ""
    queues = ", ".join(f"queue {queue}: {number:,}" for queue, number in sorted(pair.backlog.items()))
    return f"{counted(pair.backlog.total(), 'message')} beyond the offset ({queues})"


def reports(result: JobResult, limit: int | None = None) -> list[PairReport]:
    """Return what a report says of each pair, with at most so many findings and repairs in all; None is no limit."""
    findings = shares([pair.findings.num_rows for pair in result.pairs], limit)
    repairs = shares([len(pair.repairs) for pair in result.pairs], limit)
    return [
        PairReport(pair, kinds(pair, result), first_findings(pair.findings, some), pair.repairs[:others])
        for pair, some, others in zip(result.pairs, findings, repairs, strict=True)
    ]


def shares(numbers: Sequence[int], limit: int | None) -> list[int]:
    """Return how many of each may be shown, at most ``limit`` in all: equal shares, and the rest goes to the first.

    So that a hundred thousand of one kind don't hide the only one of another. None is no limit.
    """
    if limit is None:
        return list(numbers)
    granted = [0] * len(numbers)
    while limit > 0 and (hungry := [at for at, number in enumerate(numbers) if granted[at] < number]):
        share = max(1, limit // len(hungry))
        for at in hungry:
            more = min(share, numbers[at] - granted[at], limit)
            granted[at] += more
            limit -= more
    return granted


def first_findings(findings: pa.Table, limit: int | None) -> list[Finding]:
    """Return at most so many of the findings, gravest kind first, then by id; each kind has its share (`shares`)."""
    return list(to_findings(findings.take(_first(findings, limit))))


def gravest(findings: pa.Table, limit: int) -> pa.Table:
    """Return at most so many of the findings, those of `first_findings`, in the order of their ids."""
    some = findings if findings.num_rows <= limit else findings.take(_first(findings, limit))
    return some.sort_by("id")


def _first(findings: pa.Table, limit: int | None) -> pa.Array:
    outcomes = findings["outcome"].to_numpy()
    # Stable: within a kind the order of ids stays.
    order = np.argsort(outcomes, kind="stable")
    _, starts, numbers = np.unique(outcomes[order], return_index=True, return_counts=True)
    granted = zip(starts, shares(numbers.tolist(), limit), strict=True)
    return pa.array(np.concatenate([order[:0], *(order[start : start + some] for start, some in granted)]))


def first_rows(measure: MeasureResult, limit: int) -> list[MeasureRow]:
    """Return at most so many rows of a measure in their order: those that don't add up, then the last ones."""
    by_weight = sorted(range(len(measure.rows)), key=lambda at: (not measure.rows[at].unexplained, -at))
    return [measure.rows[at] for at in sorted(by_weight[:limit])]


# --- as JSON ---------------------------------------------------------------------------------------------

#: The version of the names.
VERSION = 1


def as_json(result: JobResult, limit: int | None = None) -> dict[str, Any]:
    """Return the report as a value of plain JSON types; ``limit`` is as in `reports`."""
    reached = verdict(result)
    value: dict[str, Any] = as_plain(
        {
            "version": VERSION,
            "begun_at": result.begun_at,
            "seconds": result.seconds,
            "applied": result.applied,
            "in_sync": result.in_sync,
            "verdict": reached.sentence,
            "differences": reached.differences,
            "left": reached.left,
            "pairs": [_pair(pair) for pair in reports(result, limit)],
            "measures": [measure_as_json(measure) for measure in result.measures],
        }
    )
    return value


def _pair(report: PairReport) -> dict[str, Any]:
    pair, window = report.result, report.result.window
    named = {name: getattr(pair, name) for name in ("run_id", "begun_at", "in_sync", "plan", "healed", "seconds")}
    shown = ("kind", "number", "left", "mend", "action", "done", "healed", "refused")
    return named | {
        "topic": pair.pair.topic,
        "group": pair.pair.group,
        "window": {"since": window.since, "until": window.until, "grace": window.grace},
        "counts": {outcome: pair.counts[outcome] for outcome in Outcome},
        "differences": [
            {name: getattr(each, name) for name in shown} | {"meaning": each.kind.meaning} for each in report.kinds
        ],
        "lag": _lag(pair.lag),
        "findings": [_finding(finding, pair.begun_at) for finding in report.findings],
        "findings_left_out": pair.left_out + pair.findings.num_rows - len(report.findings),
        "left_out": pair.left_out,
        "backlog": {str(queue): number for queue, number in sorted(pair.backlog.items())},
        "repairs": report.repairs,
        "repairs_left_out": len(pair.repairs) - len(report.repairs),
    }


def _lag(lag: Lag | None) -> dict[str, Any] | None:
    if lag is None:
        return None
    percentiles = {f"p{share}": lag.within(share / 100) for share in (50, 90, 99)}
    return {**as_plain(lag), "total": lag.total, **percentiles}


def _finding(finding: Finding, now: dt.datetime) -> dict[str, Any]:
    fields = {name: value for name, value in fields_of(finding).items() if name not in DIGESTS}
    kind, id_ = fields.pop("outcome"), fields.pop("id")
    return {"id": id_, "kind": kind, "sentence": sentence_of(finding, now), "since": finding.since, **fields}


def measure_as_json(measure: MeasureResult, limit: int | None = None) -> dict[str, Any]:
    """Return a measure as a value of plain JSON types, with at most ``limit`` of its rows (`first_rows`)."""
    named = {name: getattr(measure, name) for name in ("name", "by", "in_sync", "faults")}
    shown = list(measure.rows) if limit is None else first_rows(measure, limit)
    tables = {
        name: [dataclasses.asdict(row) | {"unexplained": row.unexplained} for row in rows]
        for name, rows in (("totals", measure.totals), ("rows", shown))
    }
    pair = {"topic": measure.pair.topic, "group": measure.pair.group}
    value: dict[str, Any] = as_plain(named | pair | tables | {"rows_left_out": len(measure.rows) - len(shown)})
    return value


# --- as data ---------------------------------------------------------------------------------------------

# The differences of a run as an Arrow table with names in place of numbers, and as a folder of Parquet files. It is a
# data set that any reader of Hive's layout knows (Spark, DuckDB, Polars, pyarrow): each run of a pair is a file of its
# own in the folder of the day (UTC) on which it began, `day=2026-03-14/RUN.parquet`. It is there at once and whole, and
# the same run takes the place of its own file. A run without differences has a file without rows.

#: What of a finding isn't as `rows.FINDING` has it: numbers stand for names there.
_NAMED = {"state", "opinion", "torn", "status"}

#: One row for each difference that is listed. ``began_at`` is when the run began, by the databases' clock; ``action``
#: is what the policy does about it, ``result`` what came of that: ``done``, ``healed``, or why it was refused; null
#: where it wasn't tried. The rest is what either side says of the message (`rows.PRODUCER`, `rows.CONSUMER`), null
#: where it says nothing; ``effects`` is null where no business table is named, ``opinion`` without one.
#: ``message_id`` is the id as its own table has it.
FINDINGS: pa.Schema = pa.schema(
    [
        pa.field("run", pa.string(), nullable=False),
        pa.field("began_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("producer", pa.string(), nullable=False),
        pa.field("consumer", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("feed", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("action", pa.string(), nullable=False),
        pa.field("result", pa.string()),
        *(
            pa.field(field.name, pa.string() if field.name in _NAMED else field.type)
            for field in FINDING
            if field.name not in {"id", "outcome", "foreign_id", *DIGESTS}
        ),
    ]
)

#: Under which a file says in its own metadata how the pair fared: all that is counted, and the part left out.
_KEY = b"outbox"


def findings_of(result: JobResult) -> pa.Table:
    """Return the differences of all pairs of a job, as `FINDINGS`.

    Of each pair they are those that ``max_findings`` lets be listed; `PairResult.left_out` is how many it doesn't.
    """
    return pa.concat_tables([FINDINGS.empty_table(), *(_of_pair(pair, result) for pair in result.pairs)])


def write_findings(folder: Destination, result: JobResult) -> None:
    """Write the differences of each pair of a job as a file of a data set, and make the folder if need be.

    Raises:
        OSError: a file can't be written; nothing of it remains under its name.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415 - of this form alone

    for pair in result.pairs:
        rows = _of_pair(pair, result)
        of_day = folder / f"day={pair.begun_at.astimezone(dt.UTC):%Y-%m-%d}"
        facts = {
            "counts": counts_as_json(pair.counts),
            "left_out": pair.left_out,
            "healed": pair.healed,
            "applied": result.applied,
        }
        facts |= {"since": pair.window.since, "until": pair.window.until}
        with whole_at(of_day / f"{pair.run_id}.parquet") as file:
            pq.write_table(rows.replace_schema_metadata({_KEY: json.dumps(as_plain(facts))}), file, compression="zstd")


def _of_pair(pair: PairResult, result: JobResult) -> pa.Table:
    found, number = pair.findings, pair.findings.num_rows
    ids = to_uuids(found)
    results = {repaired.id: repaired.result for repaired in pair.repairs}
    actions = {kind: kind.repair(result.policy, pair.plan.foreign) for kind in KINDS}
    columns = named(found) | {
        "run": pa.repeat(str(pair.run_id), number),
        "began_at": pa.repeat(pa.scalar(pair.begun_at, FINDINGS.field("began_at").type), number),
        "producer": pa.repeat(result.labels[0], number),
        "consumer": pa.repeat(result.labels[1], number),
        "topic": pa.repeat(pair.pair.topic, number),
        "feed": pa.repeat(pair.pair.feed, number),
        "group": pa.repeat(pair.pair.group, number),
        "action": _names({int(kind): action.value for kind, action in actions.items()}, found["outcome"]),
        "result": pa.array([results.get(each) for each in ids], pa.string()),
    }
    return pa.table([columns[name] for name in FINDINGS.names], schema=FINDINGS)


def named(found: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Return the columns of a table of findings (`rows.FINDING`), with names for numbers, and ids as texts."""
    columns = {name: found[name] for name in found.column_names if name not in {"id", "outcome", "foreign_id"}}
    ids = pa.array([str(each) for each in to_uuids(found)], pa.string())
    columns["message_id"] = pc.coalesce(found["foreign_id"], ids)
    for name, (kind, least) in NUMBERS.items():
        values = pc.if_else(pc.less(found[name], least), None, found[name])
        if issubclass(kind, enum.IntEnum):
            values = _names({each.value: each.name.lower() for each in kind}, values)
        columns["kind" if name == "outcome" else name] = values
    return columns


def _names(names: dict[int, str], numbers: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the names of numbers; null where there is none."""
    known = pa.array([names.get(number) for number in range(max(names) + 1)], pa.string())
    return pc.take(known, numbers)


# --- on a terminal ----------------------------------------------------------------------------------------

_ROWS_SHOWN = 20


def print_report(result: JobResult, console: Console, findings: int = 20) -> None:
    """Print the report with at most so many findings in all, each pair and each kind with its share."""
    from rich.text import Text  # noqa: PLC0415 - of this form alone

    pairs = ((*_summary(pair), *_findings(pair)) for pair in reports(result, findings))
    for parts in (*pairs, *map(_measure, result.measures)):
        for part in parts:
            console.print(part)
        console.print()
    begun = result.begun_at.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    repairs = "with" if result.applied else "without"
    console.print(Text(f"begun at {begun}Z, took {duration(result.seconds)}, {repairs} repairs", "dim"))
    reached = verdict(result)
    console.print(Text(plain(reached.sentence), "bold green" if reached.in_sync else "bold red"))


def _summary(report: PairReport) -> Iterator[RenderableType]:
    from rich.table import Table  # noqa: PLC0415 - of this form alone
    from rich.text import Text  # noqa: PLC0415 - of this form alone

    pair = report.result
    yield Text(plain(str(pair.pair)), "bold")
    facts = Table.grid("", "", padding=(0, 2))
    for name, text in _facts(report):
        facts.add_row(name, Text(plain(text)))
    yield facts
    yield ""
    yield table_of(
        ("messages>", "outcome", ""),
        [
            (f"{pair.counts[outcome]:,}", outcome.label, outcome.meaning)
            for outcome in Outcome
            if not outcome.differs and (pair.counts[outcome] or outcome is Outcome.CONSUMED)
        ],
    )
    yield ""
    if report.kinds:
        yield table_of(
            ("messages>", "difference", "left>", "repair"),
            [
                (
                    f"{kind.number:,}",
                    Text(kind.kind.label, "bold"),
                    Text(f"{kind.left:,}", "bold red" if kind.left else "green"),
                    kind.repair,
                )
                for kind in report.kinds
            ],
        )
    else:
        yield Text("no differences", "bold green")


def _facts(report: PairReport) -> Iterator[tuple[str, str]]:
    pair, plan = report.result, report.result.plan
    for doubt in plan.doubts:
        yield "doubt", doubt
    yield "window", f"{pair.window}, grace {duration(pair.window.grace)}"
    yield "plan", f"{plan.tier.value} tier, {plan.engine.value} engine"
    for why in plan.why:
        yield "", why
    ranges = [counted(plan.ranges, "range")]
    if plan.buckets:
        ranges += [f"{counted(plan.buckets, 'bucket')}", f"{plan.differing:,} differing", f"{plan.settled:,} settled"]
    yield "read", f"{counted(plan.rows_read, 'row')} of {', '.join(ranges)}"
    if cost := cost_of(plan):
        yield "cost", cost
    if pair.seconds:
        stages = ", ".join(f"{name} {duration(seconds)}" for name, seconds in pair.seconds.items())
        yield "took", f"{duration(sum(pair.seconds.values()))}: {stages}"
    if report.lag:
        yield "lag", report.lag
    if behind := backlog_of(pair):
        yield "backlog", behind
    if bounded := listed_of(pair):
        yield "listed", bounded
    if pair.healed:
        yield "healed", f"{counted(pair.healed, 'difference')} at the second look"


def _findings(report: PairReport) -> Iterator[RenderableType]:
    from rich.padding import Padding  # noqa: PLC0415 - of this form alone
    from rich.text import Text  # noqa: PLC0415 - of this form alone

    for kind in report.kinds:
        yield ""
        yield Text(kind.kind.label, "bold").append(f": {kind.kind.meaning}", "default")
        yield Padding(Text(f"mend: {plain(kind.mend)}"), (0, 0, 0, 2), expand=False)
        shown = [finding for finding in report.findings if finding.outcome is kind.kind]
        rows = [(finding.name, sentence_of(finding, report.result.begun_at)) for finding in shown]
        yield Padding(table_of((), rows), (0, 0, 0, 2), expand=False)
        if kind.number > len(rows):
            rest = f"  … and {kind.number - len(rows):,} more" if rows else f"  {kind.number:,} of them"
            yield Text(rest, "dim")


def _measure(measure: MeasureResult) -> Iterator[RenderableType]:
    from rich.text import Text  # noqa: PLC0415 - of this form alone

    yield Text(plain(f"{measure.name} ({measure.pair})"), "bold")
    for fault in measure.faults:
        yield Text(plain(fault), "bold red")
    wrong = measure.unexplained
    shown = [row for row in first_rows(measure, _ROWS_SHOWN) if row.unexplained]
    rows = [_cells(row, "") for row in shown] + [_cells(row, "bold") for row in measure.totals]
    yield table_of(
        (", ".join(measure.by), "value", "producer>", "rolled\nback>", "consumer>", "in\nflight>", "unexplained>"), rows
    )
    explained = len(measure.rows) - len(wrong)
    more = len(wrong) - len(shown)
    left_out = f"{counted(more, 'more row')} with something unexplained; " if more else ""
    yield Text(f"{left_out}{counted(explained, 'row')} {'adds' if explained == 1 else 'add'} up", "dim")


def _cells(row: MeasureRow, style: str) -> list[Text]:
    from rich.text import Text  # noqa: PLC0415 - of this form alone

    texts = (key_text(row.key), row.value, *map(amount, (row.producer, row.rolled_back, row.consumer, row.in_flight)))
    unexplained = Text(amount(row.unexplained), "bold red" if row.unexplained else style)
    return [*(Text(plain(text), style) for text in texts), unexplained]


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """Return rows as a table; a column name that ends with ``>`` is aligned to the right."""
    from rich.table import Table  # noqa: PLC0415 - of this form alone
    from rich.text import Text  # noqa: PLC0415 - of this form alone

    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(columns))
    for column in columns:
        # Folded where it doesn't fit, and never cut: half a number is another number.
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(value if isinstance(value, Text) else Text(plain(value)) for value in row))
    return table
