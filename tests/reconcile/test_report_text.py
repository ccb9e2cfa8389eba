"""The report on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outbox.reconcile.job import KINDS, Outcome
from outbox.reconcile.report import print_report
from outbox.reconcile.rows import JobResult
from tests.reconcile.report_samples import HOSTILE, every_kind, id_of, job, money, pair_result, row, whole


def printed(result: JobResult, width: int = 200, findings: int = 20) -> str:
    """Return what the report prints on a terminal of a width."""
    out = io.StringIO()
    print_report(result, Console(file=out, width=width, highlight=False, markup=False), findings)
    return out.getvalue()


def test_an_empty_job_is_in_sync() -> None:
    """A job without findings says so for its pair, and ends with the verdict."""
    text = printed(job([pair_result(consumed=3)]))
    assert "no differences" in text
    assert text.endswith("\nin sync\n")


def test_the_whole_is_told() -> None:
    """Plan, reasons, counts, kinds, repairs, findings, lag, measures and the verdict are all there."""
    text = printed(whole(), findings=54)
    lines = text.splitlines()
    assert any(
        line.split() == ["1,234,567", "consumed", "committed,", "dispatched", "and", "consumed"] for line in lines
    )
    for expected in (
        "2026-03-14 02:00:00+00:00, grace 5m00s",
        "digest tier, local engine",
        "Spark's start would take longer",
        "second look 300ms",
        "expected 1,100 rows, 2.5 MB, 4.2s; it came to 1,234 rows, 2.6 MB, 3.9s",
        "50% within 100 ms, 90% within 300 ms, 99% within 10 s (a sample of 1,223 messages)",
        "1 repaired (resend), 1 healed meanwhile, 1 refused: somebody else holds its row (1)",
        "4 differences at the second look",
    ):
        assert expected in text
    for kind in KINDS:
        assert sum(line.startswith(f"{kind.label}: ") for line in lines) == 1
    assert text.count("019ce") == 54
    assert lines[-1] == "52 differences left, 5 of 57 repaired; bank: 1 transfers, 1.50 amount unexplained"


def test_of_a_measure_only_what_is_off_is_shown_with_the_totals() -> None:
    """Rows that add up are counted, and each amount keeps its cents."""
    text = printed(whole())
    assert "2026-03-12" not in text.split("bank (orders → billing)")[1]
    assert [line.split() for line in text.splitlines() if line.startswith(("2026-03-13 ", "total"))] == [
        ["2026-03-13", "transfers", "120", "0", "100", "19", "1"],
        ["2026-03-13", "amount", "12,000.00", "0.00", "10,000.00", "1,998.50", "1.50"],
        ["total", "transfers", "1,320", "24", "1,264", "31", "1"],
        ["total", "amount", "132,006.00", "240.00", "129,646.00", "2,118.50", "1.50"],
    ]
    assert "24 rows add up" in text


def test_of_many_findings_the_first_are_shown() -> None:
    """No more than asked for, and how many more there are."""
    text = printed(job([pair_result([row(Outcome.MISSING, number) for number in range(1000)])]), findings=5)
    assert [str(id_of(number)) in text for number in (0, 4, 5)] == [True, True, False]
    assert "… and 995 more" in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_number_is_cut(width: int) -> None:
    """On a narrow terminal cells are folded, and no digit of them is lost."""
    text = printed(job([], [money((("account",), "amount", "77777777777.77", "0", "0", "0"))]), width)
    assert all(len(line) <= width for line in text.splitlines())
    # Producer and unexplained of the row and of the total, and the verdict.
    assert text.count("7") == 5 * 13


def test_what_is_hostile_does_not_steer_the_terminal() -> None:
    """Control characters in reasons, measure names and keys are written out."""
    result = job([pair_result(every_kind(), why=(HOSTILE,))], [money(((HOSTILE,), HOSTILE, "1", "0", "0", "0"))])
    text = printed(result)
    assert "\x1b" not in text
    assert "\\x1b[31m" in text
