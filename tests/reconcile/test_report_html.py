"""The report as an HTML page."""

from __future__ import annotations

import re
from decimal import Decimal
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from outbox.reconcile.job import KINDS, Outcome, Repair
from outbox.reconcile.report.html import HEIGHT, kinds_over_time, measure_bars, render, timeline, write_html
from outbox.reconcile.rows import Repaired
from tests.reconcile.report_samples import HOSTILE, NOW, every_kind, id_of, job, money, pair_result, row, table, whole

_VOID = {"meta", "link", "rect", "line", "br"}


class Page(HTMLParser):
    """A page, read: its tags, attributes, headings and text; fails if a tag isn't closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[tuple[int, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    @property
    def text(self) -> str:
        """What a reader sees, in one line."""
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID or (tag == "rect" and self.get_starttag_text()[-2:] != "/>"):  # type: ignore[index]
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag that has no content."""
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Close the tag that was opened last."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note a text."""
        if "style" not in self.open:
            self.texts.append(data)
            if self.open and self.open[-1] in {"h1", "h2", "h3"}:
                level, text = self.headings.pop()
                self.headings.append((level, text + data))


@pytest.fixture(scope="module")
def page() -> Page:
    """A page with everything in it."""
    return Page(render(whole()))


def test_it_is_well_formed_and_its_headings_are_in_order(page: Page) -> None:
    """Every tag is closed, the language is named, there is one h1, and no level is skipped."""
    assert ("html", {"lang": "en"}) in page.tags
    levels = [level for level, _ in page.headings]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.headings[0] == (1, "52 differences left, 5 of 57 repaired")


def test_it_loads_nothing_and_runs_nothing(page: Page) -> None:
    """No script, no handler, no address but its own anchors and data, and a policy that forbids the rest."""
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "iframe", "object", "embed", "img", "form", "base"}
    attributes = {(name, value or "") for _, attrs in page.tags for name, value in attrs.items()}
    assert not [name for name, _ in attributes if name.startswith("on")]
    assert all(value.startswith(("#", "data:")) for name, value in attributes if name in {"href", "src", "xlink:href"})
    text = render(whole())
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in attributes


def test_the_whole_is_told(page: Page) -> None:
    """Kinds, repairs, findings, plan, lag, durations and amounts are all on the page."""
    for kind in KINDS:
        assert kind.label in page.text
    for expected in (
        "bank: 1 transfers, 1.50 amount unexplained",
        "1 refused: somebody else holds its row (1)",
        "Spark's start would take longer",
        "50% within 100 ms",
        "second look 300ms",
        "expected 1,100 rows, 2.5 MB, 4.2s; it came to 1,234 rows, 2.6 MB, 3.9s",
        "4 more differences had healed at the second look.",
        "dispatched at queue 2, position 23002, 2 sends, 6h00m ago; the inbox doesn't know it",
        "132,006.00",
    ):
        assert expected in page.text
    found = set(re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", page.text))
    assert len(found) == 57 + 1  # and the run


def test_each_chart_has_a_name_and_a_table(page: Page) -> None:
    """A picture is announced with what it shows, or hidden from who listens; its figures stand in a table."""
    svgs = [attrs for tag, attrs in page.tags if tag == "svg"]
    named = [attrs for attrs in svgs if attrs.get("role") == "img"]
    assert len(named) == 2
    assert all(attrs["aria-label"] for attrs in named)
    assert sum(tag == "figure" for tag, _ in page.tags) == sum(tag == "details" for tag, _ in page.tags) == len(named)
    assert "within 100 ms 700" in page.text


def test_what_is_hostile_stays_text() -> None:
    """Markup and control characters in reasons, results, names, keys and faults are shown and do nothing."""
    result = job(
        [
            pair_result(
                [row(Outcome.MISSING, 0)],
                why=(HOSTILE,),
                seconds={HOSTILE: 1.0},
                repairs=[Repaired(id_of(0), Outcome.MISSING, Repair.RESEND, HOSTILE)],
            )
        ],
        [
            type(money())(
                HOSTILE,
                pair_result().pair,
                (HOSTILE,),
                money(((HOSTILE,), HOSTILE, "1", "0", "0", "0")).rows,
                (HOSTILE,),
            )
        ],
        applied=True,
    )
    text = render(result)
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script" not in text
    assert "\x1b" not in text
    shown = "<script>alert('x')</script>\\x1b[31m\"&"
    assert page.text.count(shown) >= 10
    assert (1, "1 difference left") in page.headings


def test_nothing_found_makes_a_quiet_page() -> None:
    """A job in sync has the verdict, its counts and its plan, and no chart of differences."""
    page = Page(render(job([pair_result(consumed=3)])))
    assert page.headings[0] == (1, "in sync")
    assert "No differences." in page.text
    assert "Since when" not in page.text
    assert Page(render(job())).headings == [(1, "in sync")]


def test_a_hundred_thousand_findings_make_a_page_that_opens() -> None:
    """The page has the first 500, of each kind and pair some, says how many more there are, and stays small."""
    many = [row(Outcome.MISSING, number) for number in range(100_000)]
    repairs = [Repaired(id_of(number), Outcome.MISSING, Repair.RESEND, "done") for number in range(100_000)]
    other = pair_result([row(Outcome.PHANTOM, 5)])
    text = render(job([pair_result(many, repairs=repairs), other], applied=True))
    assert len(text) < 500_000
    assert "99,501 more" in text
    assert "99,500 more." in text
    assert text.count('<td class="id">') == 1000
    assert "phantom" in text


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is there is replaced at once; if writing fails it stays, and nothing else is left behind."""
    path = tmp_path / "report.html"
    write_html(path, job())
    first = path.read_text()
    write_html(path, whole())
    second = path.read_text()
    assert (first == render(job()), second == render(whole())) == (True, True)

    def no_space(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(OSError, match="No space"):
        write_html(path, job())
    assert path.read_text() == second
    assert list(tmp_path.iterdir()) == [path]


def test_columns_stand_for_their_numbers() -> None:
    """In the chart over time each kind's height is its number's share of the highest column, one upon the other."""
    rows = [row(Outcome.PHANTOM, 0), row(Outcome.MISSING, 1), row(Outcome.MISSING, 2), row(Outcome.MISSING, 3, hours=9)]
    times = timeline(table(rows), NOW)
    assert times is not None
    chart = kinds_over_time(times, {Outcome.PHANTOM: "c0", Outcome.MISSING: "c1"})
    assert chart.highest == 3
    assert [(rect.colour, round(rect.height * 3 / HEIGHT)) for rect in chart.rects] == [("c1", 1), ("c0", 1), ("c1", 2)]
    below, above = chart.rects[1:]
    assert below.y + below.height == pytest.approx(HEIGHT)
    assert above.y + above.height == pytest.approx(below.y)
    assert chart.rows == (
        ("03-13 17:00", "missing", "1"),
        ("03-13 23:00", "phantom", "1"),
        ("03-13 23:00", "missing", "2"),
    )


def test_more_kinds_than_colours_share_one() -> None:
    """Kinds after the sixth have the same colour, and the legend says so."""
    chart = Page(render(job([pair_result(every_kind())])))
    assert "other kinds" in chart.text


def test_bars_of_a_measure_end_where_its_numbers_do() -> None:
    """What arrived, is in flight and is unexplained make up the length of what was sent; refunds lie below zero."""
    measure = money((("a",), "amount", "100", "20", "50", "20"), (("b",), "amount", "-20", "0", "-20", "0"))
    ((value, (first, second)),) = measure_bars(measure)
    assert value == "amount"
    assert [(rect.colour, rect.x, rect.width) for rect in first.sent] == [("sent", 20, 80)]
    assert [(rect.colour, rect.x, rect.width) for rect in first.arrived] == [
        ("consumed", 20, 50),
        ("flight", 70, 20),
        ("unexplained", 90, 10),
    ]
    assert [(rect.colour, rect.x, rect.width) for rect in second.arrived] == [("consumed", 0, 20)]


def test_of_a_measure_with_many_keys_what_is_off_is_shown() -> None:
    """Of a thousand accounts some are shown, the one that doesn't add up among them, and how many are left out."""
    accounts = ((f"account {at:04}",) for at in range(1000))
    booked = money(
        *((key, "amount", "1.00", "0", "0.99" if key[0].endswith("0007") else "1.00", "0") for key in accounts)
    )
    text = Page(render(job([], [booked]))).text
    assert "account 0007" in text
    assert "960 more rows, which the JSON report has; all of them add up." in text
    assert Decimal("0.01") == booked.unexplained[0].unexplained
