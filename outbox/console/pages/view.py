"""From data to a page: Jinja2 with escaping always on, and what every template may use."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from outbox.console.pages import routes, words
from outbox.console.permissions import Permission
from outbox.operator.model import Action, Total
from outbox.text import duration, plain

if TYPE_CHECKING:
    from starlette.requests import Request

    from outbox.console.console import Console
    from outbox.console.pages.overview import Badges
    from outbox.console.problems import Problem

#: The pages in the order of the navigation: name, title, icon, the key after ``g``.
NAVIGATION = (
    ("", "Overview", "grid", "o"),
    ("messages", "Messages", "mail", "m"),
    ("dead", "Dead letters", "stop", "d"),
    ("halves", "Halves & checks", "half", "h"),
    ("scheduled", "Scheduled", "clock", "s"),
    ("inbox", "Inbox", "inbox", "i"),
    ("operations", "Operations", "list", "p"),
    ("handlers", "Handlers", "braces", "l"),
    ("audit", "Audit", "book", "a"),
    ("system", "System", "server", "y"),
)


# What may be better the next time.
_AGAIN = frozenset({409, 412, 422, 500, 503})


@dataclass(frozen=True, slots=True)
class View:
    """Renders the pages of one console. ``badges`` are the numbers in the navigation."""

    console: Console
    badges: Badges = field(repr=False)

    def page(self, request: Request, template: str, status: int = 200, **data: Any) -> HTMLResponse:
        """Return a page; its template gets ``data`` and the rest of the shell."""
        names = [(name, name) for name in self.console.admin.databases]
        common = {"badges": self.badges.now(self.console), "databases": names, "several": len(names) > 1}
        context = self._shell(request) | common | data
        return HTMLResponse(_environment().get_template(template).render(context), status)

    def problem(self, request: Request, problem: Problem, **data: Any) -> HTMLResponse:
        """Return an error as a page that says what failed and how to go on."""
        nothing: dict[str, Any] = {"badges": {}, "databases": [], "several": False}
        context = self._shell(request) | nothing | {"problem": problem, "again": self._again(request, problem)} | data
        page = HTMLResponse(_environment().get_template("problem.html").render(context), problem.status)
        page.headers.update(problem.headers)
        return page

    def _again(self, request: Request, problem: Problem) -> str | None:
        """Return where to look again after something went wrong: at the message or operation that it was about."""
        section, _, rest = self.console.facts(request).path.strip("/").partition("/")
        about = rest.partition("/")[0]
        found = section in {"messages", "operations"} and about and problem.status in _AGAIN
        return self.console.path(request, section, about) if found else None

    def _shell(self, request: Request) -> dict[str, Any]:
        console = self.console
        facts = console.facts(request)

        def url(*segments: object, **query: Any) -> str:
            return console.path(request, *segments, **query)

        def static(file: str) -> str:
            return console.path(request, "static", routes.by_file()[file].name)

        def can(wanted: Permission | Action | str) -> bool:
            return facts.principal is not None and console.may(request, wanted)

        return {
            "url": url,
            "static": static,
            "can": can,
            "can_any": lambda actions: any(map(can, actions)),
            "console": console,
            "principal": facts.principal,
            "request_id": facts.request_id,
            "section": facts.path.strip("/").partition("/")[0],
            "here": console.path(request, *facts.path.strip("/").split("/")),
            "query": request.url.query,
            "did": _did(request),
            "now": dt.datetime.now(dt.UTC),
        }


def _did(request: Request) -> str | None:
    """Return what was done last, to be told; a link can only name an action, never bring its own text."""
    done = request.query_params.get("did")
    if done in set(Action):
        return words.ACTS[Action(done)].told
    return {"start": "Ordered. Workers carry it out.", "cancel": "Cancelled: what is left is not done."}.get(done or "")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("outbox.console"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "day": _day,
        "iso": _iso,
        "utc": _utc,
        "ago": _ago,
        "number": number,
        "many": many,
        "size": size,
        "duration": lambda seconds: "\N{EN DASH}" if seconds is None else duration(seconds),
        "short": short,
        "told": told,
        "without": without,
        "sentence": sentence,
        "by_way": by_way,
    }
    environment.globals |= {
        "NAVIGATION": NAVIGATION,
        "ACTS": words.ACTS,
        "EVENTS": words.EVENTS,
        "needs_reason": words.needs_reason,
        "chip_of": words.chip,
        "Action": Action,
        "Permission": Permission,
    }
    return environment


def _finalize(value: object) -> object:
    # Control characters are written out: they must steer neither the page nor a terminal that they are copied to.
    return plain(value) if type(value) is str else value


def _iso(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _utc(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S") + " UTC"


def _day(moment: dt.datetime) -> str:
    """Return a moment as tables show it: as short as it can be on this day."""
    utc, today = moment.astimezone(dt.UTC), dt.datetime.now(dt.UTC)
    if utc.year != today.year:
        return utc.strftime("%Y-%m-%d %H:%M")
    return utc.strftime("%H:%M:%S" if utc.date() == today.date() else "%d %b %H:%M")


def _ago(moment: dt.datetime) -> str:
    """Return how long ago a moment is, or in how long; as `console.js` keeps it up to date."""
    seconds = (dt.datetime.now(dt.UTC) - moment).total_seconds()
    size = round(abs(seconds))
    if not size:
        return "now"
    unit, length = next((pair for pair in (("d", 86400), ("h", 3600), ("min", 60)) if size >= pair[1]), ("s", 1))
    text = f"{size // length} {unit}"
    return f"in {text}" if seconds < 0 else f"{text} ago"


def number(value: float | None) -> str:
    """Return a number for people, with as many digits as they need."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1:
        return f"{value:,.1f}"
    return f"{value:.3f}".rstrip("0") if abs(value) >= 0.001 else "< 0.001"


def many(total: Total) -> str:
    """Return how many there are: ``12``, or ``10,000+`` where nobody counted on."""
    return f"{total.value:,}{'+' if total.relation == 'gte' else ''}"


def size(count: int) -> str:
    """Return a number of bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def short(identifier: object) -> str:
    """Return an id that fits a table; its end tells it from its neighbours, which were born at the same time."""
    text = str(identifier)
    return f"{text[:8]}…{text[-8:]}" if len(text) > 20 else text


def told(value: Any) -> str:
    """Return a value from a JSON column as a text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {told(each)}" for name, each in value.items() if each not in (None, [], {}, ""))
    if isinstance(value, list):
        return ", ".join(map(told, value))
    return json.dumps(value, ensure_ascii=False, default=str)


def without(value: Any, name: str) -> Any:
    """Return a value without one of its parts."""
    return {key: each for key, each in value.items() if key != name} if isinstance(value, Mapping) else value


def by_way(origin: Mapping[str, Any] | None) -> str:
    """Return by which way an act came, and from where."""
    return ", ".join(told(origin[part]) for part in ("via", "ip") if part in origin) if origin else ""


def sentence(clause: str) -> str:
    """Return a clause as a sentence, as far as its first letter and its end go."""
    text = clause.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
