"""How large the ranges are that are digested: a sample tells, and that never costs more than to read all."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox.reconcile import pairing, plan
from outbox.reconcile import sql as reconcile_sql
from outbox.reconcile.job import Outcome, Range, Tier
from outbox.reconcile.plan import Digested
from outbox.reconcile.run import foresee
from tests.reconcile.town import Town, counted, kinds


@dataclass
class Numbers:
    """Two sides that have the numbers below ``rows`` as ids, and differ in some of them."""

    rows: int
    odd: Sequence[int]

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

    def sample(self, chance: random.Random) -> tuple[plan.Sample, float]:
        """Digest a few small ranges, as a comparison does; return what that costs, too."""
        count = min(self.rows // plan._MESSAGES_OF_SAMPLE, plan._MOST_SAMPLES)
        firsts = sorted(chance.sample(range(0, self.rows - plan.SAMPLE_ROWS, plan.SAMPLE_ROWS), count))
        ranges = [Range(UUID(int=n), UUID(int=n + plan.SAMPLE_ROWS)) for n in firsts]
        spent = count * (plan.RESCANNED * plan.SAMPLE_ROWS + plan.RANGE + plan.BUCKET)
        return plan.Sample(count, len(self.told(ranges).differing), plan.SAMPLE_ROWS), spent

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
    """Whatever differs: sample, digests and reading cost a tenth more than reading all at most, mostly less."""
    chance = random.Random(number)  # noqa: S311
    numbers = Numbers(1_000_000, how(1_000_000, number, chance))  # type: ignore[operator]
    whole = plan.everything(numbers.rows).micros

    sample, spent = numbers.sample(chance)
    best = plan.first_digests(numbers.rows, sample.density)
    if best.pays:
        pieces = numbers.cut(best.size)
        spent += plan.SCANNED * numbers.rows + plan.BUCKET * len(pieces)
        found = numbers.told(pieces)
        spent += min(plan.reading(found.rows_differing, len(plan.joined(found.differing))), whole)
    else:
        spent += whole

    assert spent <= 1.1 * whole
    if number <= 1_000:
        assert spent <= 0.6 * whole


@given(st.integers(1, 100_000_000), st.floats(0, 1))
@example(1, 0.0015)
def test_the_model_never_chooses_what_it_reckons_dearer(messages: int, density: float) -> None:
    """Digests are chosen where they cost less than reading, in no more ranges than can be numbered."""
    best = plan.first_digests(messages, density)
    assert best.micros <= plan.everything(messages).micros
    assert best.buckets <= max(plan.MOST_BUCKETS, messages // 8_000 + 1)
    assert 0 <= best.rows <= 2.001 * messages


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
def test_large_ranges_that_differ_are_read_and_the_next_night_little_of_them(
    town: Town, mixing: reconcile_sql.Mixing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large range that differs is read as it is, and cut up the next night: what is clean in it is settled then."""
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
    assert result.plan.buckets <= 4
    assert result.plan.rows_read > 10_000
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
