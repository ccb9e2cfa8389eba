"""The report as one JSON object: names that stay, decimals and ids as strings, times in ISO 8601 and UTC.

``version`` grows when a name goes or changes its meaning; new names may come at any time.

    version, begun_at, seconds, applied         of the job; ``applied``: with repairs
    in_sync, verdict, differences, left         ``left`` are neither repaired nor healed by the end of the run
    pairs[]
      topic, group, run_id, begun_at, in_sync
      window      {since, until, grace}         null is no bound; grace in seconds
      plan        {tier, engine, why[], ranges, buckets, differing, kept, rows_read}
      counts      {outcome: number}             every outcome, also those that are 0
      healed                                    differences that were gone at the second look
      differences[]  {kind, number, left, meaning, mend, action, done, healed, refused: {reason: number}}
      lag         {bounds[], counts[], total, sampled, p50, p90, p99} or null
                                                seconds; a percentile is the bound below it, null beyond the last one
      findings[]  {id, kind, sentence, since, state, sends, queue, position, at, compensated, producer_digest, status,
                   attempts, received_at, changed_at, effects, consumer_digest}
      findings_left_out                         how many a limit kept out of ``findings``
      repairs[]   {id, kind, action, result}    result: ``done``, ``healed``, or why it was refused
      repairs_left_out
      seconds     {stage: seconds}
    measures[]
      name, topic, group, by[], in_sync         everything adds up, and could be read
      faults[]                                  sentences about what couldn't be read
      totals[]    {key[], value, producer, rolled_back, consumer, in_flight, unexplained}
      rows[]      the same, for each key
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

from outbox.reconcile.model import Outcome
from outbox.reconcile.options import Policy
from outbox.reconcile.report.facts import KindTold, first_findings, kinds, verdict
from outbox.reconcile.report.sentences import MEANING, mend, seen
from outbox.reconcile.result import Finding, JobResult, Lag, MeasureResult, MeasureRow, PairResult

#: The version of the names.
VERSION = 1

_PLAIN = frozenset({bool, int, float, str})


def as_json(result: JobResult, limit: int | None = None) -> dict[str, Any]:
    """Return the report as a value of plain JSON types.

    ``limit`` is the greatest number of findings, and of repairs, of each pair; None shows them all.
    """
    told = verdict(result)
    value = {
        "version": VERSION,
        "begun_at": result.begun_at,
        "seconds": result.seconds,
        "applied": result.applied,
        "in_sync": result.in_sync,
        "verdict": told.sentence,
        "differences": told.differences,
        "left": told.left,
        "pairs": [_pair(pair, result, limit) for pair in result.pairs],
        "measures": [_measure(measure) for measure in result.measures],
    }
    plain: dict[str, Any] = _plain(value)
    return plain


def _pair(pair: PairResult, result: JobResult, limit: int | None) -> dict[str, Any]:
    findings = first_findings(pair.findings, limit)
    repairs = pair.repairs[:limit]
    return {
        "topic": pair.pair.topic,
        "group": pair.pair.group,
        "run_id": pair.run_id,
        "begun_at": pair.begun_at,
        "in_sync": pair.in_sync,
        "window": pair.window,
        "plan": pair.plan,
        "counts": {outcome: pair.counts[outcome] for outcome in Outcome},
        "healed": pair.healed,
        "differences": [_kind(kind, result.policy) for kind in kinds(pair, result)],
        "lag": _lag(pair.lag),
        "findings": [_finding(finding, pair.begun_at) for finding in findings],
        "findings_left_out": pair.findings.num_rows - len(findings),
        "repairs": repairs,
        "repairs_left_out": len(pair.repairs) - len(repairs),
        "seconds": pair.seconds,
    }


def _kind(told: KindTold, policy: Policy) -> dict[str, Any]:
    return {
        "kind": told.kind,
        "number": told.number,
        "left": told.left,
        "meaning": MEANING[told.kind],
        "mend": mend(told.kind, policy),
        "action": told.action,
        "done": told.done,
        "healed": told.healed,
        "refused": told.refused,
    }


def _lag(lag: Lag | None) -> dict[str, Any] | None:
    if lag is None:
        return None
    percentiles = {f"p{share}": lag.within(share / 100) for share in (50, 90, 99)}
    return {"bounds": lag.bounds, "counts": lag.counts, "total": lag.total, "sampled": lag.sampled, **percentiles}


def _finding(finding: Finding, now: dt.datetime) -> dict[str, Any]:
    # Shallow, and not dataclasses.asdict, which would copy each value of each of perhaps a hundred thousand.
    fields = {field.name: getattr(finding, field.name) for field in dataclasses.fields(finding)}
    kind = fields.pop("outcome")
    return {"id": fields.pop("id"), "kind": kind, "sentence": seen(finding, now), "since": finding.since, **fields}


def _measure(measure: MeasureResult) -> dict[str, Any]:
    return {
        "name": measure.name,
        "topic": measure.pair.topic,
        "group": measure.pair.group,
        "by": measure.by,
        "in_sync": measure.in_sync,
        "faults": measure.faults,
        "totals": [_row(row) for row in measure.totals],
        "rows": [_row(row) for row in measure.rows],
    }


def _row(row: MeasureRow) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"unexplained": row.unexplained}


def _plain(value: Any) -> Any:  # noqa: PLR0911 - one line for each type
    if value is None or type(value) in _PLAIN:  # nearly all, where there are many findings
        return value
    match value:
        case enum.Enum():
            return value.name.lower()
        case dt.datetime():
            return value.astimezone(dt.UTC).isoformat()
        case UUID():
            return str(value)
        case Decimal():
            return f"{value:f}"
        case bytes():
            return value.hex()
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        case _:
            return value
