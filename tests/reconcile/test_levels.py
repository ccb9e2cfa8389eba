"""Digests level by level: what differs is cut up as far as it pays, and that never costs more than to read all."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from unittest import mock
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.reconcile import pairing, plan
from outbox.reconcile import sql as reconcile_sql
from outbox.reconcile.job import Outcome, Range, Tier
from outbox.reconcile.plan import Digested, narrowed
from outbox.reconcile.run import foresee
from tests.reconcile.town import Town, counted, kinds


@dataclass
class Numbers:
    """Two sides that have the numbers below ``rows`` as ids, and differ in some of them; counts what is done."""

    rows: int
    odd: Sequence[int]
    spent: float = 0.0
    levels: list[int] = field(default_factory=list)

    def points(self, ranges: Sequence[Range], rows: int) -> list[UUID]:
        """Return each so manieth number of the ranges."""
        return [UUID(int=n) for each in ranges for n in range(each.first.int + rows, self._end(each), rows)]

    def digest(self, ranges: Sequence[Range], pieces: Sequence[Range]) -> Digested:
        """Tell pieces in which a number differs from others."""
        self.levels.append(len(pieces))
        rows = sum(self._rows(each) for each in ranges)
        self.spent += plan.SPLIT * len(ranges) + plan.RESCANNED * rows + plan.BUCKET * len(pieces)
        return self.told(pieces)

    def told(self, pieces: Sequence[Range]) -> Digested:
        """Return what digests of the pieces say."""
        result = Digested([], [])
        for each in pieces:
            if bisect_left(self.odd, each.first.int) < bisect_left(self.odd, self._end(each)):
                result.differing.append((each, 2 * self._rows(each)))
            else:
                result.clean.append((each, Counter({Outcome.CONSUMED: self._rows(each)})))
        return result

    def cut(self, size: int) -> list[Range]:
        """Return all numbers in ranges of a size."""
        firsts = [UUID(int=n) for n in range(0, self.rows, size)]
        return [Range(first, end) for first, end in zip(firsts, [*firsts[1:], None], strict=True)]

    def sample(self, chance: random.Random) -> plan.Sample:
        """Digest a few small ranges, as a comparison does."""
        count = min(self.rows // plan._MESSAGES_OF_SAMPLE, plan._MOST_SAMPLES)
        firsts = sorted(chance.sample(range(0, self.rows - plan.SAMPLE_ROWS, plan.SAMPLE_ROWS), count))
        ranges = [Range(UUID(int=n), UUID(int=n + plan.SAMPLE_ROWS)) for n in firsts]
        return plan.Sample(count, len(self.digest(ranges, ranges).differing), plan.SAMPLE_ROWS)

    def _end(self, each: Range) -> int:
        return self.rows if each.end is None else each.end.int

    def _rows(self, each: Range) -> int:
        return self._end(each) - each.first.int


def scattered(rows: int, number: int, chance: random.Random) -> list[int]:
    """Return so many numbers anywhere."""
    return sorted(chance.sample(range(rows), number))


def together(rows: int, number: int, chance: random.Random) -> list[int]:
    """Return numbers that follow each other, as an outage leaves them."""
    first = chance.randrange(rows - number + 1)
    return list(range(first, first + number))


def in_clumps(rows: int, number: int, chance: random.Random) -> list[int]:
    """Return numbers in clumps of a hundred, anywhere."""
    firsts = chance.sample(range(0, rows - 200, 200), number // 100 + 1)
    return sorted(n for first in firsts for n in range(first, first + 100))


@pytest.mark.parametrize("how", [scattered, together, in_clumps])
@pytest.mark.parametrize("number", [0, 5, 100, 1_000, 10_000, 60_000])
def test_digests_never_cost_much_more_than_reading_everything(how: object, number: int) -> None:
    """Whatever differs: sample, levels and reading together cost a tenth more than reading all at most, mostly less."""
    chance = random.Random(number)  # noqa: S311
    numbers = Numbers(1_000_000, how(1_000_000, number, chance))  # type: ignore[operator]
    whole = plan.everything(numbers.rows).micros

    sample = numbers.sample(chance)
    best = plan.first_digests(numbers.rows, sample.density)
    if best.pays:
        pieces = numbers.cut(best.size)
        numbers.spent += plan.SCANNED * numbers.rows + plan.BUCKET * len(pieces)
        found = narrowed(numbers, numbers.told(pieces), sample)
        numbers.spent += min(plan.reading(found.rows_differing, len(plan.joined(found.differing))), whole)
    else:
        numbers.spent += whole

    assert numbers.spent <= 1.1 * whole
    if number <= 1_000:
        assert numbers.spent <= 0.6 * whole


@given(st.integers(100, 3_000), st.sets(st.integers(0, 2_999), max_size=60), st.integers(2, 1_500))
def test_levels_lose_no_id_and_no_difference(rows: int, odd: set[int], size: int) -> None:
    """However far ranges are cut up: together they are all ids once, in order; each difference is in one to read."""
    numbers = Numbers(rows, sorted(n for n in odd if n < rows))
    first = numbers.told(numbers.cut(size))
    with mock.patch.multiple(plan, RESCANNED=0.0, BUCKET=0.0, SPLIT=0.0):
        found = narrowed(numbers, first, None)

    every = sorted([each for each, _ in found.clean] + [each for each, _ in found.differing])
    assert every[0].first == UUID(int=0)
    assert all(before.end == after.first for before, after in pairwise(every))
    assert every[-1].end is None
    assert found.clean == sorted(found.clean, key=lambda each: each[0])
    assert found.differing == sorted(found.differing)
    assert found.rows_differing <= first.rows_differing
    for n in numbers.odd:
        assert any(UUID(int=n) in each for each, _ in found.differing)


def test_ranges_without_rows_are_read_as_they_are() -> None:
    """An op without a half makes a range differ that has no row of either side."""
    numbers = Numbers(100, [])
    found = Digested([], [(Range(UUID(int=0), None), 0)])
    assert narrowed(numbers, found, plan.Sample(10, 5, 2)) == found
    assert numbers.levels == []


@given(st.integers(1, 100_000_000), st.floats(0, 1), st.floats(1, 1_000))
def test_the_model_never_chooses_what_it_reckons_dearer(messages: int, density: float, differences: float) -> None:
    """Digests are chosen where they cost less than reading, and ranges are cut only where that costs less again."""
    best = plan.first_digests(messages, density)
    assert best.micros <= plan.everything(messages).micros
    assert best.buckets <= max(plan.MOST_BUCKETS, messages // 8_000 + 1)
    assert 0 <= best.rows <= 2.001 * messages
    assert plan.pieces_of(2, differences) == 1
    assert plan.pieces_of(100_000, 1.0) > 1


def test_what_differs_everywhere_is_read_without_digests(town: Town) -> None:
    """One message in three differs, in each small range: whichever are sampled tell, and all is read at once."""
    town.plant_bulk(30_000)
    town.at_producer("ANALYZE outbox.half_message")
    town.run("UPDATE outbox.consumer_message SET body_digest = decode('00', 'hex') WHERE position % 3 = 0")

    result = town.reconcile(tier=Tier.DIGEST)

    assert result.counts[Outcome.DIGEST_MISMATCH] > 9_000
    assert result.counts.total() == 30_000
    assert result.plan.buckets == 0
    assert "digests wouldn't pay: everything is read" in result.plan.why
    assert result.plan.expected is not None
    assert result.plan.came is not None
    assert result.plan.came.rows == result.plan.rows_read > 59_000
    assert result.plan.came.bytes > 50 * result.plan.rows_read
    assert abs(result.plan.expected.rows - result.plan.rows_read) < 3_000


@pytest.mark.parametrize("mixing", [reconcile_sql.FAST, reconcile_sql.PORTABLE], ids=["fast", "portable"])
def test_large_ranges_that_differ_are_digested_once_more(
    town: Town, mixing: reconcile_sql.Mixing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large ranges that differ little is read; what is clean in them is settled, and the next night reads less."""
    ids = town.plant_bulk(30_000)
    town.at_producer("ANALYZE outbox.half_message")
    odd = [ids[100], ids[500], ids[501]]
    town.forget(*odd)
    monkeypatch.setattr(pairing, "mixing_of", lambda snapshots: mixing)
    monkeypatch.setattr(plan, "_FEWEST_SAMPLES", 1_000_000)
    monkeypatch.setattr(plan, "_ROWS_OF_BUCKET", 10_000)

    result = town.reconcile(tier=Tier.DIGEST)

    assert kinds(result) == dict.fromkeys(odd, Outcome.MISSING)
    assert counted(result) == {Outcome.CONSUMED: 29_997, Outcome.MISSING: 3}
    assert any("digested once more" in why for why in result.plan.why)
    assert result.plan.buckets > 30
    assert result.plan.rows_read < 3_000
    again = town.reconcile(tier=Tier.DIGEST)
    assert (kinds(again), again.counts) == (kinds(result), result.counts)
    assert again.plan.rows_read < 600


def test_a_comparison_is_foreseen_without_reading(town: Town) -> None:
    """How a pair would be compared, and what to expect of it, is told by samples; nothing is written."""
    town.plant_bulk(30_000)
    town.at_producer("ANALYZE outbox.half_message")

    ((pair, foreseen),) = foresee(town.job(tier=Tier.AUTO))
    result = town.reconcile(tier=Tier.AUTO)

    assert pair == result.pair
    assert foreseen.tier is result.plan.tier is Tier.DIGEST
    assert foreseen.came is None
    assert foreseen.expected is not None
    assert foreseen.expected.rows < 6_000
    assert result.plan.came is not None
    assert foreseen.expected.bytes < 30 * result.plan.came.bytes
    assert foreseen.expected.seconds > 0
