"""The report as one HTML file: charts drawn beforehand, no script, and nothing that is loaded from anywhere.

Jinja2 escapes whatever it is given, and the page's own policy (CSP) forbids scripts and every request.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import uuid4

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from outbox.reconcile.model import Outcome
from outbox.reconcile.report import charts
from outbox.reconcile.report.facts import KindTold, Verdict, first_findings, kinds, lag_sentence, shares, verdict
from outbox.reconcile.report.sentences import MEANING, amount, counted, mend, seen
from outbox.reconcile.report.timeline import timeline
from outbox.reconcile.result import Finding, JobResult, MeasureResult, PairResult
from outbox.text import duration, plain

#: The greatest number of findings on the page, and of repairs, over all pairs.
LIMIT = 500


@dataclass(frozen=True, slots=True)
class _PairPage:
    """What the page shows of a pair."""

    told: PairResult
    kinds: list[KindTold]
    colours: dict[Outcome, str]
    time: charts.Columns | None
    undated: int
    lag: charts.Columns | None
    lag_sentence: str
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class _MeasurePage:
    """What the page shows of a measure."""

    told: MeasureResult
    values: list[tuple[str, list[charts.Bars]]]
    left_out: int
    left_out_adds_up: bool


@dataclass(frozen=True, slots=True)
class _Tile:
    """One number at the head of the page."""

    name: str
    number: int
    note: str = ""
    tone: str = ""


def write_html(path: Path, result: JobResult, limit: int = LIMIT) -> None:
    """Write the page, at once and whole: a temporary file beside it is renamed."""
    text = render(result, limit)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def render(result: JobResult, limit: int = LIMIT) -> str:
    """Return the page, with at most so many findings and repairs."""
    findings = shares([pair.findings.num_rows for pair in result.pairs], limit)
    repairs = shares([len(pair.repairs) for pair in result.pairs], limit)
    told = verdict(result)
    headline, *rest = told.texts
    return _template().render(
        result=result,
        verdict=told,
        headline=headline,
        rest=rest,
        tiles=_tiles(result, told),
        pairs=[_pair(pair, result, share) for pair, share in zip(result.pairs, findings, strict=True)],
        repairs=repairs,
        measures=[_measure(measure) for measure in result.measures],
        no_difference=[outcome for outcome in Outcome if not outcome.differs],
        consumed=Outcome.CONSUMED,
        in_flight=Outcome.IN_FLIGHT,
        chart_height=charts.HEIGHT,
    )


def _pair(pair: PairResult, result: JobResult, limit: int) -> _PairPage:
    times = timeline(pair.findings, pair.begun_at)
    colours = charts.colours(list(pair.differences))
    return _PairPage(
        pair,
        kinds(pair, result),
        colours,
        charts.kinds_over_time(times, colours) if times else None,
        times.undated if times else pair.findings.num_rows,
        charts.lags(pair.lag) if pair.lag and pair.lag.total else None,
        lag_sentence(pair),
        first_findings(pair.findings, limit),
    )


def _measure(measure: MeasureResult) -> _MeasurePage:
    values = charts.measure_bars(measure)
    shown = [bar.row for _, bars in values for bar in bars]
    wrong = sum(bool(row.unexplained) for row in shown)
    return _MeasurePage(measure, values, len(measure.rows) - len(shown), wrong == len(measure.unexplained))


def _tiles(result: JobResult, told: Verdict) -> list[_Tile]:
    counts = sum((pair.counts for pair in result.pairs), Counter[Outcome]())
    unexplained = [measure for measure in result.measures if not measure.in_sync]
    tiles = [
        _Tile("compared", counts.total(), "messages"),
        _Tile("in flight", counts[Outcome.IN_FLIGHT], "not late"),
        _Tile("differences", told.differences, "found", "bad" if told.differences else "good"),
        _Tile("left", told.left, "neither repaired nor healed", "bad" if told.left else "good"),
        _Tile("rows read", sum(pair.plan.rows_read for pair in result.pairs), "one by one"),
    ]
    if result.measures:
        tiles.insert(
            4,
            _Tile(
                "measures",
                len(unexplained),
                f"of {len(result.measures)} don't add up",
                "bad" if unexplained else "good",
            ),
        )
    return tiles


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("outbox.reconcile.report"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "amount": amount,
        "code": _code,
        "counted": counted,
        "duration": duration,
        "moment": _moment,
        "number": lambda value: f"{value:,}",
    }
    environment.globals |= {"MEANING": MEANING, "mend": mend, "seen": seen}
    return environment.get_template("report.html.j2")


def _finalize(value: object) -> object:
    # Control characters as well: who copies them from the page into a terminal mustn't be steered by them.
    return plain(value) if type(value) is str else value


def _code(text: str) -> Markup:
    """Return a text with what stands between backticks as code."""
    return Markup().join(
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(text.split("`"))
    )


def _moment(moment: dt.datetime | None) -> str:
    return "" if moment is None else moment.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S") + " UTC"
