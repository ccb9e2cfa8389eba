"""Results to report: small ones written by hand, and one with every kind of difference."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa

from outbox.message.ids import uuid7_at
from outbox.reconcile.job import KINDS, EngineName, Outcome, Pair, Repair, Tier, Window
from outbox.reconcile.measure.result import MeasureResult, MeasureRow
from outbox.reconcile.rows import (
    FINDING,
    LAG_BOUNDS,
    ComparisonPlan,
    Estimate,
    JobResult,
    Lag,
    PairResult,
    Repaired,
)
from outbox.reconcile.tables import InboxState, ProducerState, Torn

NOW = dt.datetime(2026, 3, 14, 2, 0, tzinfo=dt.UTC)
PAIR = Pair("orders", "billing")
POLICY: dict[Outcome, Repair] = {}
RUN = UUID(int=uuid7_at(NOW.timestamp()).int + 1)
EXPECTED, CAME = Estimate(1_100, 2_500_000, 4.2), Estimate(1_234, 2_600_000, 3.9)
HOSTILE = "<script>alert('x')</script>\x1b[31m\"&"


def id_of(number: int, hours: float = 3.0) -> UUID:
    """Return an id that was made so many hours before `NOW`."""
    return UUID(int=uuid7_at(NOW.timestamp() - hours * 3600).int + number)


def row(kind: Outcome, number: int, hours: float = 3.0, **values: Any) -> dict[str, Any]:
    """Return a finding as a comparison returns it: dispatched so many hours ago, unless the values say otherwise."""
    at = NOW - dt.timedelta(hours=hours)
    return {
        "id": id_of(number, hours).bytes,
        "outcome": int(kind),
        "state": int(ProducerState.DISPATCHED),
        "sends": 1,
        "queue": number % 8,
        "position": number,
        "at": at,
        "compensated": False,
        "torn": int(Torn.NO),
        "producer_digest": b"\xab" * 16,
        **values,
    }


def handled(status: InboxState, hours: float = 2.9, **values: Any) -> dict[str, Any]:
    """Return the consumer's columns of a finding."""
    at = NOW - dt.timedelta(hours=hours)
    return {
        "status": int(status),
        "attempts": 1,
        "received_at": at,
        "changed_at": at,
        "effects": -1,
        "consumer_digest": b"\xab" * 16,
        **values,
    }


NO_PRODUCER: Mapping[str, Any] = dict.fromkeys(
    ("state", "sends", "queue", "position", "at", "compensated", "torn", "producer_digest")
)

#: What the columns of a finding of each kind look like, besides those of `row`.
LOOKS: Mapping[Outcome, Mapping[str, Any]] = {
    Outcome.TORN: {"torn": int(Torn.MESSAGE_WITHOUT_HALF)},
    Outcome.CONSUMED_THOUGH_ROLLED_BACK: {"state": int(ProducerState.ROLLED_BACK), **handled(InboxState.CONSUMED)},
    Outcome.DUPLICATE_EFFECT: handled(InboxState.CONSUMED, effects=2),
    Outcome.LOST: {**NO_PRODUCER, **handled(InboxState.CONSUMED)},
    Outcome.PHANTOM: {**NO_PRODUCER, **handled(InboxState.CONSUMED)},
    Outcome.DIGEST_MISMATCH: handled(InboxState.CONSUMED, consumer_digest=b"\xcd" * 16),
    Outcome.NO_EFFECT: handled(InboxState.CONSUMED, effects=0),
    Outcome.UNRECORDED: {"effects": 1},
    Outcome.STATUS_MISMATCH: handled(InboxState.FAILED, effects=1, attempts=3),
    Outcome.UNCOMPENSATED: handled(InboxState.QUARANTINED, attempts=0),
    Outcome.AHEAD_OF_CLOCK: {"sends": 1},
    Outcome.UNDISPATCHED: {"state": int(ProducerState.COMMITTED), "sends": 0, "queue": 0, "position": 0},
    Outcome.RESEND_EXHAUSTED: {"sends": 4},
    Outcome.MISSING: {"sends": 2},
    Outcome.UNCONSUMED: {},
    Outcome.OPINION_DIFFERS: {"opinion": int(InboxState.FAILED), **handled(InboxState.CONSUMED)},
    Outcome.PARKED: handled(InboxState.PARKED, attempts=16),
    Outcome.FAILED: handled(InboxState.FAILED, attempts=3),
    Outcome.UNDECIDED: {"state": int(ProducerState.UNDECIDED), "sends": 0, "queue": 0, "position": 0},
}


def table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return findings as the table that a comparison returns, sorted by id."""
    return pa.Table.from_pylist([dict(row) for row in rows], schema=FINDING).sort_by("id")


def pair_result(
    rows: Sequence[Mapping[str, Any]] = (),
    *,
    pair: Pair = PAIR,
    consumed: int = 0,
    in_flight: int = 0,
    why: tuple[str, ...] = (),
    repairs: Sequence[Repaired] = (),
    lag: Lag | None = None,
    seconds: Mapping[str, float] | None = None,
) -> PairResult:
    """Return the result of a pair with these findings."""
    counts = Counter(Outcome(row["outcome"]) for row in rows)
    counts[Outcome.CONSUMED] = consumed
    counts[Outcome.IN_FLIGHT] = in_flight
    return PairResult(
        run_id=RUN,
        pair=pair,
        window=Window(NOW - dt.timedelta(days=1), NOW),
        begun_at=NOW,
        plan=ComparisonPlan(
            Tier.DIGEST, EngineName.LOCAL, why, 16, 4096, 3, 4000, 1234, {"producer": 12.5}, EXPECTED, CAME
        ),
        counts=counts,
        findings=table(rows),
        open=table([]),
        lag=lag,
        repairs=list(repairs),
        seconds=dict(seconds or {}),
    )


def _hours(kind: Outcome, number: int) -> float:
    return 3.0 + (int(kind) * 7 + number) % 20


def _aged(look: Mapping[str, Any], hours: float) -> dict[str, Any]:
    at = NOW - dt.timedelta(hours=hours - 0.1)
    return {**look, "changed_at": at} if "changed_at" in look else dict(look)


def every_kind(each: int = 1) -> list[dict[str, Any]]:
    """Return so many findings of each kind, some of them older than others."""
    return [
        row(kind, 1000 * int(kind) + number, _hours(kind, number), **_aged(LOOKS[kind], _hours(kind, number)))
        for kind in KINDS
        for number in range(each)
    ]


def money(*rows: tuple[tuple[str, ...], str, str, str, str, str], by: tuple[str, ...] = ("day",)) -> MeasureResult:
    """Return a measure with these rows: key, value, producer, rolled back, consumer, in flight."""
    return MeasureResult(
        "bank",
        PAIR,
        by,
        tuple(MeasureRow(key, value, *(Decimal(number) for number in numbers)) for key, value, *numbers in rows),
    )


def job(
    pairs: Sequence[PairResult] = (), measures: Sequence[MeasureResult] = (), *, applied: bool = False
) -> JobResult:
    """Return the result of a job."""
    return JobResult(NOW, list(pairs), list(measures), 12.5, applied)


def whole() -> JobResult:
    """Return a result with everything in it: every kind, repairs done and refused, lags, measures."""
    rows = every_kind(3)
    missing = [UUID(bytes=row["id"]) for row in rows if row["outcome"] == Outcome.MISSING]
    undispatched = [UUID(bytes=row["id"]) for row in rows if row["outcome"] == Outcome.UNDISPATCHED]
    repairs = [
        *(
            Repaired(message, Outcome.UNDISPATCHED, Outcome.UNDISPATCHED.repair(POLICY), "done")
            for message in undispatched
        ),
        Repaired(missing[0], Outcome.MISSING, Outcome.MISSING.repair(POLICY), "done"),
        Repaired(missing[1], Outcome.MISSING, Outcome.MISSING.repair(POLICY), "healed"),
        Repaired(missing[2], Outcome.MISSING, Outcome.MISSING.repair(POLICY), "somebody else holds its row"),
    ]
    compared = pair_result(
        rows,
        consumed=1_234_567,
        in_flight=42,
        why=("16 ranges of 4,096 buckets: 3 differ, so only those are read", "Spark's start would take longer"),
        repairs=repairs,
        lag=Lag(LAG_BOUNDS, (5, 100, 700, 300, 80, 20, 9, 3, 2, 1, 1, 0, 2), sampled=True),
        seconds={"plan": 0.12, "compare": 2.5, "second look": 0.3, "measures": 0.4, "repair": 0.2},
    )
    compared.healed = 4
    days = [f"2026-03-{day:02}" for day in range(1, 14)]
    booked = money(
        *(((day,), "transfers", "100", "2", "97", "1") for day in days[:-1]),
        *(((day,), "amount", "10000.50", "20.00", "9970.50", "10.00") for day in days[:-1]),
        ((days[-1],), "transfers", "120", "0", "100", "19"),
        ((days[-1],), "amount", "12000.00", "0.00", "10000.00", "1998.50"),
    )
    return job([compared, pair_result(pair=Pair("orders", "mail"), consumed=99)], [booked], applied=True)
