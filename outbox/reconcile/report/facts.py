"""What a report counts: repairs by kind, what is left, the verdict, and which findings it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce

import numpy as np
import pyarrow as pa

from outbox.reconcile.model import Action, Outcome
from outbox.reconcile.repair.work import DONE, HEALED
from outbox.reconcile.report.sentences import amount, bound, counted
from outbox.reconcile.result import EXACT, Finding, JobResult, MeasureResult, MeasureRow, PairResult, to_findings

_REASONS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class KindTold:
    """How many differences of one kind there were, what is done about them, and what became of it.

    ``tried``: repairs were to be done. ``refused`` counts by reason.
    """

    kind: Outcome
    number: int
    action: Action
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
        """What was done, or would be done, about them, in a few words."""
        if self.action is Action.ALERT:
            return ""
        if not self.tried:
            return f"--apply: {self.action.value}"
        parts = []
        if self.done:
            parts.append(f"{self.done:,} repaired ({self.action.value})")
        if self.healed:
            parts.append(f"{self.healed:,} healed meanwhile")
        if self.refused:
            reasons = [f"{reason} ({number:,})" for reason, number in self.refused.most_common(_REASONS_SHOWN)]
            if len(self.refused) > _REASONS_SHOWN:
                reasons.append(f"and {counted(len(self.refused) - _REASONS_SHOWN, 'other reason')}")
            parts.append(f"{self.refused.total():,} refused: {'; '.join(reasons)}")
        return ", ".join(parts) or "not tried"


def kinds(pair: PairResult, result: JobResult) -> list[KindTold]:
    """Return the differences of a pair by kind, gravest first; of several repairs of a message the last counts."""
    results: dict[Outcome, Counter[str]] = {kind: Counter() for kind in pair.differences}
    for repaired in {repaired.id: repaired for repaired in pair.repairs}.values():
        results.setdefault(repaired.kind, Counter())[_reason(repaired.result)] += 1
    return [
        KindTold(
            kind,
            number,
            result.policy.action(kind),
            result.applied,
            results[kind].pop(DONE, 0),
            results[kind].pop(HEALED, 0),
            results[kind],
        )
        for kind, number in pair.differences.items()
    ]


def _reason(result: str) -> str:
    # A database's error has several lines.
    return " ".join(result.removeprefix("refused: ").split())


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
        if self.in_sync:
            return ("in sync",)
        parts = []
        if self.differences:
            parts.append(f"{counted(self.left, 'difference')} left")
        if self.left < self.differences:
            parts.append(f"{self.differences - self.left:,} of {self.differences:,} repaired")
        return (", ".join(parts), *self.measures) if parts else self.measures


def verdict(result: JobResult) -> Verdict:
    """Return what a job comes to."""
    told = [kind for pair in result.pairs for kind in kinds(pair, result)]
    return Verdict(
        sum(kind.number for kind in told),
        sum(kind.left for kind in told),
        tuple(text for measure in result.measures for text in _unexplained(measure)),
    )


def _unexplained(measure: MeasureResult) -> Iterable[str]:
    amounts = [
        f"{amount(unexplained(rows))} {' '.join([value, *currency])}"
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


def shares(numbers: Sequence[int], limit: int) -> list[int]:
    """Return how many of each may be shown, at most ``limit`` in all: equal shares, and what is over goes to the first.

    So that a hundred thousand of one kind don't hide the only one of another.
    """
    granted = [0] * len(numbers)
    while limit > 0 and (hungry := [place for place, number in enumerate(numbers) if granted[place] < number]):
        share = max(1, limit // len(hungry))
        for place in hungry:
            more = min(share, numbers[place] - granted[place], limit)
            granted[place] += more
            limit -= more
    return granted


def first_findings(findings: pa.Table, limit: int | None) -> list[Finding]:
    """Return at most so many of the findings, gravest kind first, then by id; each kind has its share (`shares`)."""
    outcomes = findings["outcome"].to_numpy()
    # Stable: within a kind the order of ids stays.
    order = np.argsort(outcomes, kind="stable")
    if limit is not None:
        _, starts, numbers = np.unique(outcomes[order], return_index=True, return_counts=True)
        granted = shares(numbers.tolist(), limit)
        order = np.concatenate(
            [order[:0], *(order[start : start + some] for start, some in zip(starts, granted, strict=True))]
        )
    return list(to_findings(findings.take(pa.array(order))))


def first_rows(measure: MeasureResult, limit: int) -> list[MeasureRow]:
    """Return at most so many rows of a measure in their order: those that don't add up, then the last ones."""
    by_weight = sorted(range(len(measure.rows)), key=lambda at: (not measure.rows[at].unexplained, -at))
    return [measure.rows[at] for at in sorted(by_weight[:limit])]


def lag_sentence(pair: PairResult) -> str:
    """Return the percentiles of the lag in a sentence; empty if none was measured."""
    if pair.lag is None or not pair.lag.total:
        return ""
    texts = []
    for share in (0.5, 0.9, 0.99):
        within = pair.lag.within(share)
        where = f"over {bound(pair.lag.bounds[-1])}" if within is None else f"within {bound(within)}"
        texts.append(f"{share:.0%} {where}")
    what = "a sample of " if pair.lag.sampled else ""
    return f"{', '.join(texts)} ({what}{counted(pair.lag.total, 'message')})"
