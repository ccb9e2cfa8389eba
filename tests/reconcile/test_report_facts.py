"""What a report counts, chooses and says, whatever its form."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.message.ids import uuid7_at
from outbox.reconcile.job import KINDS, Outcome, Repair
from outbox.reconcile.repair import BUSY
from outbox.reconcile.report import bound, first_findings, first_rows, kinds, sentence_of, shares, verdict
from outbox.reconcile.report.html import WIDTHS, timeline
from outbox.reconcile.rows import LAG_BOUNDS, Lag, Repaired, to_findings
from outbox.reconcile.tables import InboxState
from tests.reconcile.report_samples import (
    NO_PRODUCER,
    NOW,
    every_kind,
    handled,
    id_of,
    job,
    money,
    pair_result,
    row,
    table,
)


def test_nothing_found_is_in_sync() -> None:
    """A job without differences and with measures that add up is in sync, and says so."""
    told = verdict(job([pair_result(consumed=10)], [money((("d",), "amount", "10.00", "1", "8.00", "1.00"))]))
    assert (told.in_sync, told.sentence) == (True, "in sync")


def test_the_verdict_tells_what_is_left_and_what_is_unexplained() -> None:
    """Repaired and healed differences aren't left, refused ones are; amounts in different currencies aren't added."""
    rows = [row(Outcome.MISSING, number) for number in range(4)]
    repairs = [
        Repaired(id_of(number), Outcome.MISSING, Repair.RESEND, what)
        for number, what in enumerate(("done", "healed", "refused: it took effect"))
    ]
    measure = money(
        (("1", "EUR"), "amount", "10.00", "0", "8.50", "0"),
        (("2", "EUR"), "amount", "1.00", "0", "2.00", "0"),
        (("3", "JPY"), "amount", "7", "0", "0", "0"),
        by=("day", "Currency"),
    )
    told = verdict(job([pair_result(rows, repairs=repairs)], [measure], applied=True))
    assert (told.differences, told.left) == (4, 2)
    assert told.sentence == "2 differences left, 2 of 4 repaired; bank: 2.50 amount EUR, 7 amount JPY unexplained"
    assert [total.key for total in measure.totals] == [("total", "EUR"), ("total", "JPY")]


def test_a_measure_that_could_not_be_read_is_no_success() -> None:
    """A fault of a measure appears in the verdict even if no row is off."""
    measure = money()
    faulty = type(measure)(measure.name, measure.pair, measure.by, (), ("NaN can't be added up",))
    assert verdict(job([pair_result()], [faulty])).sentence == "bank: 1 fault"


def test_of_several_repairs_of_a_message_the_last_counts() -> None:
    """A message whose repair was refused at first and done later is counted once, as done."""
    rows = [row(Outcome.MISSING, 0)]
    repairs = [Repaired(id_of(0), Outcome.MISSING, Repair.RESEND, what) for what in (BUSY, "done")]
    (told,) = kinds(pair_result(rows, repairs=repairs), job(applied=True))
    assert (told.done, told.refused, told.left, told.repair) == (1, Counter(), 0, "1 repaired (resend)")


def test_reasons_are_counted_and_the_rarest_are_summed_up() -> None:
    """The three commonest reasons of refusals are told, each on one line, and how many others there are."""
    rows = [row(Outcome.MISSING, number) for number in range(9)]
    reasons = ["refused: it took effect"] * 4 + ["a\nb"] * 2 + ["c", "d", "e"]
    repairs = [Repaired(id_of(number), Outcome.MISSING, Repair.RESEND, reason) for number, reason in enumerate(reasons)]
    (told,) = kinds(pair_result(rows, repairs=repairs), job(applied=True))
    assert told.repair == "9 refused: it took effect (4); a b (2); c (1); and 2 other reasons"


def test_a_dry_run_names_the_action_that_apply_would_take() -> None:
    """Without repairs a kind with an action says what --apply does, and one without says nothing."""
    told = kinds(pair_result([row(Outcome.MISSING, 0), row(Outcome.PARKED, 1)]), job())
    assert {kind.kind: kind.repair for kind in told} == {Outcome.MISSING: "--apply: resend", Outcome.PARKED: ""}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_explained(kind: Outcome) -> None:
    """Each kind has a meaning, a mend under every policy that is possible, and a sentence about what was seen."""
    assert kind.meaning
    for action in kind.repairs:
        text = kind.mend({kind: action}, ["producer"] if kind is Outcome.OPINION_DIFFERS else (), writable=True)
        assert text.startswith("--apply ") == (action is not Repair.ALERT)
        others = [other for other in kind.repairs if other is not Repair.ALERT] if action is Repair.ALERT else [action]
        assert all(f"{kind.label} = {other.value}" in text for other in others)
    (finding,) = to_findings(table([found for found in every_kind() if found["outcome"] == kind]))
    assert " ago" in sentence_of(finding, NOW)


def test_a_sentence_has_the_facts_of_both_sides() -> None:
    """What was seen names queue, position, sends, ages, status, attempts, business rows; of bodies, no digest."""
    findings = to_findings(
        table(
            [
                row(Outcome.MISSING, 0, queue=3, position=17, sends=2),
                row(Outcome.PHANTOM, 1, **{**NO_PRODUCER, **handled(InboxState.CONSUMED, effects=2)}),
                row(Outcome.DIGEST_MISMATCH, 2, **handled(InboxState.CONSUMED, consumer_digest=b"\xcd" * 16)),
            ]
        )
    )
    assert [sentence_of(finding, NOW) for finding in findings] == [
        "dispatched at queue 3, position 17, 2 sends, 3h00m ago; the inbox doesn't know it",
        "the producer doesn't know it; the inbox says consumed, 1 attempt, 2h54m ago, 2 rows in the business table",
        "dispatched at queue 2, position 2, 3h00m ago; the inbox says consumed, 1 attempt, 2h54m ago; "
        "the bodies differ",
    ]


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 100))
def test_shares_are_fair(numbers: list[int], limit: int) -> None:
    """All that may be shown is granted, nobody gets more than he has, and who gets less than another has no more."""
    granted = shares(numbers, limit)
    assert sum(granted) == min(limit, sum(numbers))
    assert all(0 <= some <= number for some, number in zip(granted, numbers, strict=True))
    for some, number in zip(granted, numbers, strict=True):
        assert some == number or some >= max(granted) - 1


def test_many_of_one_kind_do_not_hide_the_only_one_of_another() -> None:
    """The first findings have some of each kind, gravest kind first, then in the order of ids."""
    rows = [row(Outcome.MISSING, number) for number in range(50)] + [row(Outcome.PHANTOM, 99)]
    shown = first_findings(table(rows), 4)
    assert [(finding.outcome, finding.id) for finding in shown] == [
        (Outcome.PHANTOM, id_of(99)),
        *((Outcome.MISSING, id_of(number)) for number in range(3)),
    ]
    assert len(first_findings(table(rows), None)) == 51
    assert first_findings(table([]), 4) == []


def test_rows_that_do_not_add_up_are_shown_before_all_others() -> None:
    """Of a long measure the rows with something unexplained are shown, then the last ones, in their own order."""
    booked = money(*(((f"{day:03}",), "amount", "1", "0", "0" if day == 7 else "1", "0") for day in range(100)))
    assert [row.key for row in first_rows(booked, 3)] == [("007",), ("098",), ("099",)]


def test_percentiles_are_bounds_of_the_histogram() -> None:
    """A percentile is the bound below which the share lies; beyond the last bound there is none."""
    lag = Lag((0.1, 1.0), (50, 40, 10), sampled=False)
    assert [lag.within(share) for share in (0.5, 0.9, 0.99)] == [0.1, 1.0, None]


def test_bounds_are_told_exactly() -> None:
    """A bound keeps its value: it gets a greater unit only where that is exact."""
    assert [bound(limit) for limit in LAG_BOUNDS] == [
        "10 ms", "30 ms", "100 ms", "300 ms", "1 s", "3 s", "10 s", "30 s", "100 s", "5 min", "1000 s", "1 h",
    ]  # fmt: skip


def test_the_timeline_counts_each_kind_under_its_hour() -> None:
    """Findings are counted by kind from their last change; without one, by the time in their id, if it has one."""
    hours = [3.0, 3.2, 20.0]
    rows = [row(Outcome.MISSING, number, hours=hour) for number, hour in enumerate(hours)]
    rows.append({**row(Outcome.UNRECORDED, 7, hours=20.0, **NO_PRODUCER), "effects": 1})
    rows.append({**row(Outcome.UNRECORDED, 8, **NO_PRODUCER), "id": UUID(int=5).bytes})
    told = timeline(table(rows), NOW)
    assert told is not None
    assert (told.width, told.undated) == (3600, 1)
    assert told.starts[0] == NOW - dt.timedelta(hours=20)
    assert told.starts[-1] == NOW - dt.timedelta(hours=3)
    assert (told.numbers[Outcome.MISSING][0], told.numbers[Outcome.MISSING][-2:]) == (1, (1, 1))
    assert told.numbers[Outcome.UNRECORDED] == (1, *[0] * 17)


@given(st.lists(st.floats(0, 4e8), min_size=1, max_size=20))
def test_every_span_fits_the_timeline(seconds: list[float]) -> None:
    """However long ago and far apart: not more than 48 columns, and each finding in the column of its time."""
    rows = [row(Outcome.MISSING, number, hours=ago / 3600) for number, ago in enumerate(seconds)]
    told = timeline(table(rows), NOW)
    assert told is not None
    assert len(told.starts) <= 48
    assert told.width in WIDTHS or told.width % WIDTHS[-1] == 0
    expected = Counter(int(at.timestamp()) // told.width for at in (found["at"] for found in rows))
    counted = dict(
        zip((int(at.timestamp()) // told.width for at in told.starts), told.numbers[Outcome.MISSING], strict=True)
    )
    assert {column: number for column, number in counted.items() if number} == expected


def test_an_id_from_the_future_is_no_later_than_the_run() -> None:
    """A phantom whose id was made by a wrong clock, thousands of years ahead, doesn't stretch the timeline."""
    ahead = UUID(int=uuid7_at(2.0e11).int)
    found = {**row(Outcome.UNRECORDED, 0, **NO_PRODUCER), "id": ahead.bytes}
    told = timeline(table([found, row(Outcome.MISSING, 1)]), NOW)
    assert told is not None
    assert told.starts[-1] <= NOW


def test_sums_keep_every_digit() -> None:
    """Totals of amounts with more digits than a decimal context has by default are exact."""
    measure = money(
        (("1",), "amount", "1" + "0" * 40 + ".01", "0", "0", "0"), (("2",), "amount", "0.01", "0", "0", "0")
    )
    assert measure.totals[0].producer == Decimal("1" + "0" * 40 + ".02")
    assert verdict(job([], [measure])).sentence == f"bank: {Decimal('1' + '0' * 40 + '.02'):,f} amount unexplained"
