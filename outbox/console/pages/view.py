"""From data to a page: Jinja2 with escaping always on, what every template may use, and how statuses are shown."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from sqlalchemy.exc import SQLAlchemyError

from outbox.acts.messages import ACTS, acts_for
from outbox.acts.whole_acts import DECLARATIONS, whole_acts_of
from outbox.console.api.lists import of_each
from outbox.console.context import RequestContext, context_of
from outbox.console.events import BadgesMissing
from outbox.console.problems import Problem
from outbox.errors import OutboxError
from outbox.operator.model import MAX_PAGE, HalfFilter, HalfStatus, PageRequest, Total
from outbox.operator.operator import Operator
from outbox.telemetry.hooks import emit
from outbox.text import duration, key_text, plain, summary_of

#: The pages in the order of the navigation: name, title, icon, the key after ``g``.
NAVIGATION = (
    ("", "Overview", "grid", "o"),
    ("messages", "Messages", "mail", "m"),
    ("dead", "Dead letters", "stop", "d"),
    ("halves", "Halves & checks", "half", "h"),
    ("scheduled", "Scheduled", "clock", "s"),
    ("cron", "Schedules", "clock", "e"),
    ("inbox", "Inbox", "inbox", "i"),
    ("groups", "Groups", "person", "u"),
    ("bulk-jobs", "Bulk jobs", "list", "p"),
    ("sagas", "Sagas", "flow", "f"),
    ("reconciliations", "Reconciliation", "scales", "c"),
    ("handlers", "Handlers", "braces", "l"),
    ("audit", "Audit", "ledger", "a"),
    ("system", "System", "server", "y"),
)


_RETRYABLE = frozenset({409, 412, 422, 500, 503})
#: How long (seconds) the numbers in the navigation are reused.
_GOOD_FOR = 10.0
_MOST_GROUPS = 500

#: A count in a link has less digits.
_DIGITS = 10
#: The texts of the last act, by its code: a link can only name an act, never bring its own text.
_DONE = {act.name: act.happened for act in DECLARATIONS} | {
    "start": "Ordered. Workers carry it out.",
    "cancel": "Cancelled: the open items are not done.",
}
_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Chip:
    """How a status is shown: never by its colour alone."""

    icon: str
    tone: str
    word: str
    meaning: str


_UNKNOWN = Chip("question", "", "unknown", "this version of the console doesn't know it")

_CHIPS = {
    # A message, on the producer's side.
    "undecided": Chip("half", "warn", "undecided", "a half message that is neither committed nor rolled back"),
    "committed": Chip("check", "info", "committed", "decided, and about to be dispatched"),
    "dispatched": Chip("send", "info", "dispatched", "in its topic's queue; consumers read it from there"),
    "scheduled": Chip("clock", "info", "scheduled", "waits for the time at which it is to be delivered"),
    "recalled": Chip("undo", "", "recalled", "taken out of the schedule before its time"),
    # A message, in the inbox of a group.
    "consumed": Chip("check", "good", "consumed", "handled, with its effect, once"),
    "failed": Chip("retry", "warn", "failed", "will be retried"),
    "taken": Chip("clock", "info", "taken", "a client has it under a lease, and is to settle it"),
    "parked": Chip("stop", "bad", "parked", "set aside for an operator"),
    "rolled_back": Chip("undo", "", "rolled back", "decided: no group ever sees it"),
    "quarantined": Chip("shield", "", "quarantined", "can't take effect any more in this group"),
    "expired": Chip("clock", "", "expired", "too old when the group came to it: not handled"),
    "unconsumed": Chip("hourglass", "info", "unconsumed", "the group doesn't have it"),
    "left_out": Chip("dash", "", "left out", "the group's filter left it out, or the row was pruned"),
    "resend_exhausted": Chip("stop", "bad", "given up", "a group has lost it as often as it was sent"),
    "compensated": Chip("undo", "", "compensated", "its local transaction was undone"),
    "discarded": Chip("archive", "", "discarded", "parked, and an operator decided that this is the end of it"),
    # An undecided half.
    "immune": Chip("shield", "", "immune", "left alone before its first check"),
    "orphan": Chip("question", "warn", "orphan", "its check is due"),
    "waiting": Chip("clock", "info", "waiting", "waits for its turn"),
    # A bulk job and its items.
    "running": Chip("play", "info", "running", "workers are at it"),
    "done": Chip("check", "good", "done", "all of it was done"),
    "partly": Chip("half", "warn", "partly", "some items were skipped or failed"),
    "unhealed": Chip("alert", "bad", "failed again", "it was done, and some messages failed or are parked again"),
    "unsettled": Chip("hourglass", "info", "waiting", "it was done, and some messages wait for a worker"),
    "cancelled": Chip("x", "", "cancelled", "its open items were not done"),
    "pending": Chip("hourglass", "info", "pending", "a worker will come to it"),
    "skipped": Chip("dash", "warn", "skipped", "it couldn't be done any more"),
    "given_up": Chip("x", "bad", "failed", "it was tried, and given up"),
    # A run of a reconciliation.
    "in_sync": Chip("check", "good", "in sync", "no difference, and all sums add up"),
    "different": Chip("alert", "bad", "different", "differences were found, or sums don't add up"),
    "run_failed": Chip("x", "bad", "failed", "it came to no result"),
    "unended": Chip("question", "warn", "no end", "nothing was heard of it for minutes: its process must have died"),
    "comparing": Chip("play", "info", "running", "it compares, or repairs, at this moment"),
    # A group.
    "paused": Chip("hourglass", "warn", "paused", "an operator has paused it: workers begin nothing of it"),
    "unattended": Chip("stop", "warn", "no worker", "nothing holds it back, and no living worker consumes for it"),
    "open": Chip("stop", "bad", "breaker open", "everything failed lately: nothing is tried until the next trial"),
    "half_open": Chip("half", "warn", "half open", "its breaker is open, and one message is tried, or about to be"),
    # A saga's flow and its commands.
    "compensating": Chip("undo", "warn", "compensating", "the steps that were done are being undone"),
    "completed": Chip("check", "good", "completed", "every step was done"),
    "action": Chip("play", "info", "action", "asks the participant to do the step"),
    "compensation": Chip("undo", "", "compensation", "asks the participant to undo the step"),
    "refused": Chip("x", "warn", "refused", "the participant said no, or can't be reached"),
    "overdue": Chip("alert", "bad", "overdue", "the participant hasn't answered in time: what it did is unknown"),
    # A worker, a finding, a check.
    "alive": Chip("check", "good", "alive", "reported within the last three of its reports"),
    "silent": Chip("alert", "warn", "silent", "missed three of its reports"),
    "answered": Chip("check", "", "answered", "the checker gave an answer"),
    "silenced": Chip("clock", "", "silenced", "it needs no attention until then"),
    "planned": Chip("hourglass", "info", "planned", "it silences from then on"),
    "being_asked": Chip("hourglass", "info", "being asked", "a checker is being asked at this moment"),
    "no_answer": Chip("alert", "warn", "no answer", "the worker died over it, or was cut off"),
}


def chip_of(status: str) -> Chip:
    """Return how a status is shown."""
    return _CHIPS.get(status, _UNKNOWN)


#: What each icon stands for: acts, and the kinds of events in a timeline.
_MEANINGS = {
    "alert": ("raised",),
    "archive": ("discard", "discarded"),
    "check": ("commit", "committed", "consumed"),
    "clock": ("set_rate",),
    "half": ("written",),
    "hourglass": ("pause_group", "pause_topic", "pause_cron"),
    "inbox": ("received",),
    "person": ("act", "note"),
    "question": ("check", "checked"),
    "retry": ("reset", "retry", "failed"),
    "search": ("found",),
    "send": ("resend", "dispatched"),
    "shield": ("quarantined",),
    "stop": ("park", "half_parked", "parked"),
    "undo": ("recall", "recalled", "compensate", "compensated", "restore", "rolled_back"),
    "x": ("rollback", "reset_group", "skip_group", "delete_group", "delete_topic", "delete_cron", "end"),
}
ICONS = {name: icon for icon, names in _MEANINGS.items() for name in names}


class Badges:
    """The numbers in the navigation: what waits for an operator, counted every few seconds at most."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}
        self._until, self._lock = 0.0, threading.Lock()

    def now(self, operator: Operator) -> dict[str, str]:
        """Return the numbers by the names of pages: none for 0, with a plus where there may be more, ``?`` unknown.

        A page must not fail because they can't be counted.
        """
        with self._lock:
            if time.monotonic() < self._until:
                return self._numbers
            self._until = time.monotonic() + _GOOD_FOR
        self._numbers = {name: text for name, count in _COUNTS.items() if (text := _badge(operator, count))}
        return self._numbers

    def forget(self) -> None:
        """Count again at the next page, after an act."""
        self._until = 0.0


def _dead(operator: Operator) -> tuple[int, bool]:
    """Return how many dead letters there are, and whether there may be more."""
    groups, unreached = of_each(operator, lambda each: each.dead_groups(limit=_MOST_GROUPS))
    more = len(groups) >= _MOST_GROUPS or any(group.count.relation == "gte" for group in groups)
    return sum(group.count.value for group in groups), more or bool(unreached)


def _parked_halves(operator: Operator) -> tuple[int, bool]:
    """Return how many halves are parked, and whether there may be more."""
    page = operator.halves(HalfFilter(status=HalfStatus.PARKED), PageRequest(size=MAX_PAGE))
    return len(page.items), bool(page.next_page_token or page.unreached)


_COUNTS = {"dead": _dead, "halves": _parked_halves}


def _badge(operator: Operator, count: Callable[[Operator], tuple[int, bool]]) -> str:
    try:
        known, more = count(operator)
    except (OutboxError, SQLAlchemyError) as error:
        emit(BadgesMissing(reason=summary_of(error), error=error))
        return "?"
    if not known:
        return "?" if more else ""
    return f"{known:,}{'+' if more else ''}"


@dataclass(frozen=True, slots=True)
class PageView:
    """Give an endpoint of a page its request, its context, and the means to answer with a page."""

    request: Request
    context: RequestContext

    @property
    def operator(self) -> Operator:
        """Return the sender's operator."""
        return self.context.operator

    def page(self, template: str, status: int = 200, **data: Any) -> HTMLResponse:
        """Return a page; its template gets ``data``, and what every page shows."""
        names = [(name, name) for name in self.operator.databases]
        badges: Badges = self.request.app.state.badges
        shared = {"badges": badges.now(self.operator), "databases": names, "several": len(names) > 1}
        return self.render(template, status, **(shared | data))

    def done(self, code: str, *segments: object, count: str = "") -> Response:
        """Return the redirect after an act to the page that shows its result; ``code`` names the act.

        If ``count`` is a number, the page tells it.
        """
        self.request.app.state.badges.forget()
        return RedirectResponse(self.context.url(*segments, did=f"{code}-{count}" if count.isdecimal() else code), 303)

    def render(self, template: str, status: int, **data: Any) -> HTMLResponse:
        """Return a page without what only the databases know."""
        context = self.context

        def may(needed: str) -> bool:
            return context.identity is not None and context.may(needed)

        shared = {
            "badges": {},
            "databases": [],
            "several": False,
            "url": context.url,
            "static": lambda file: context.url("static", static_files()[file].name),
            "can": may,
            "acts_on": lambda noun, row=None: [act for act in whole_acts_of(noun, row) if may(act.permission)],
            "can_any": lambda acts: any(may(act.name) for act in acts),
            "console": context.console,
            "principal": context.identity,
            "request_id": context.request_id,
            "section": context.path.strip("/").partition("/")[0],
            "here": context.url(*context.path.strip("/").split("/")),
            "query": self.request.url.query,
            "did": _done(self.request.query_params.get("did", "")),
            "now": dt.datetime.now(dt.UTC),
        }
        return HTMLResponse(_environment().get_template(template).render(shared | data), status)


def _done(code: str) -> str:
    """Return the text of the last act, with the count in its code; a link can bring a number, but no text."""
    name, _, count = code.partition("-")
    counted = f" Count: {int(count):,}." if count.isdecimal() and len(count) < _DIGITS else ""
    return _DONE[name] + counted if name in _DONE else ""


def view_of(request: Request) -> PageView:
    """Return the view of a request."""
    return PageView(request, context_of(request))


#: The parameter by which an endpoint gets its view.
View = Annotated[PageView, Depends(view_of)]


def problem_page(request: Request, problem: Problem) -> HTMLResponse:
    """Return an error as a page that says what failed and how to go on."""
    view = view_of(request)
    section, _, rest = view.context.path.strip("/").partition("/")
    about = rest.partition("/")[0]
    # After some errors another try may succeed: the page links to the message or bulk job that the request was about.
    found = section in {"messages", "bulk-jobs"} and about and problem.status_code in _RETRYABLE
    page = view.render(
        "login.html" if section in {"login", "logout"} else "problem.html",
        problem.status_code,
        problem=problem,
        again=view.context.url(section, about) if found else None,
        onward="/",
    )
    page.headers.update(problem.headers or {})
    return page


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file that pages load; ``name`` has the digest of its content, so that browsers may keep it for ever."""

    name: str
    content_type: str
    content: bytes


@cache
def static_files() -> dict[str, StaticFile]:
    """Return the static files by the names that templates know them by."""
    files = {}
    for file in resources.files("outbox.console").joinpath("static").iterdir():
        stem, _, kind = file.name.rpartition(".")
        if kind in _TYPES:
            content = file.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:12]
            files[file.name] = StaticFile(f"{stem}.{digest}.{kind}", _TYPES[kind], content)
    return files


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
    texts = (breaking, prose, facts, short, text, sentence, key_text, columns)
    numbers = (day, iso, utc, ago, number, amount, many, elapsed)
    environment.filters |= {each.__name__: each for each in (*texts, *numbers)}
    environment.globals |= {
        "NAVIGATION": NAVIGATION,
        "ACTS": ACTS,
        "ICONS": ICONS,
        "acts_for": acts_for,
        "boolean_type": bool,
        "acts_in": lambda noun, state: [act for act in acts_for(noun) if state in act.from_states],
        "chip_of": chip_of,
    }
    return environment


def _finalize(value: object) -> object:
    # Control characters are written out: they must steer neither the page nor a terminal that they are copied to.
    return plain(value) if type(value) is str else value


def iso(moment: dt.datetime) -> str:
    """Return a moment as scripts read it."""
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc(moment: dt.datetime) -> str:
    """Return a moment in full."""
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S") + " UTC"


def day(moment: dt.datetime) -> str:
    """Return a moment as tables show it: as short as it can be on this day."""
    time, today = moment.astimezone(dt.UTC), dt.datetime.now(dt.UTC)
    if time.year != today.year:
        return time.strftime("%Y-%m-%d %H:%M")
    return time.strftime("%H:%M:%S" if time.date() == today.date() else "%d %b %H:%M")


def ago(moment: dt.datetime) -> str:
    """Return how long ago a moment is, or in how long; as `console.js` keeps it up to date."""
    seconds = (dt.datetime.now(dt.UTC) - moment).total_seconds()
    size = round(abs(seconds))
    if not size:
        return "now"
    unit, length = next((pair for pair in (("d", 86400), ("h", 3600), ("min", 60)) if size >= pair[1]), ("s", 1))
    period = f"{size // length} {unit}"
    return f"in {period}" if seconds < 0 else f"{period} ago"


def number(value: float | None) -> str:
    """Return a number for people, with as many digits as they need."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1:
        return f"{value:,.{0 if abs(value) >= 100 else 1}f}"
    return f"{value:.3f}".rstrip("0") if abs(value) >= 0.001 else "< 0.001"


def amount(digits: str) -> str:
    """Return a decimal for people, with all of its digits: ``-1,234.50``."""
    return f"{Decimal(digits):,f}"


def elapsed(seconds: float | None) -> str:
    """Return a duration for people; a dash where it isn't known."""
    return "\N{EN DASH}" if seconds is None else duration(seconds)


def many(total: Total) -> str:
    """Return how many there are: ``12``, or ``10,000+`` where the count stopped."""
    return f"{total.value:,}{'+' if total.relation == 'gte' else ''}"


def short(identifier: object) -> str:
    """Return an id that fits a table; its end differs from that of its neighbours, which were born at the same time."""
    name = str(identifier)
    return f"{name[:8]}…{name[-8:]}" if len(name) > 20 else name


def breaking(name: str) -> Markup:
    """Return a name that may break after its dots, dashes, bars and underscores, and nowhere inside a word."""
    return Markup("<wbr>").join(re.findall(r"[^._|/:-]*[._|/:-]+|[^._|/:-]+", plain(name)))


def text(value: Any) -> str:
    """Return a value from a JSON column as a text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {text(each)}" for name, each in value.items() if each not in (None, [], {}, ""))
    if isinstance(value, list):
        return ", ".join(map(text, value))
    return json.dumps(value, ensure_ascii=False, default=str)


def facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what came of an act by its names; what the called function returned, such as an amount, comes first."""
    returned = result.get("returned")
    first = dict(returned) if isinstance(returned, Mapping) else {} if returned is None else {"returned": returned}
    rest = {name: value for name, value in result.items() if name not in {"returned", "bulk_job", "did"}}
    known = {name.replace("_", " "): text(value) for name, value in (first | rest).items()}
    return [(name, value) for name, value in known.items() if value]


def columns(row: Any) -> list[str]:
    """Return the names of what a row of a preview has."""
    return [each.name for each in fields(row)]


def prose(clause: str) -> Markup:
    """Return a clause as a sentence; what stands between backticks is code."""
    parts = sentence(plain(clause)).split("`")
    return Markup("").join(Markup("<code>{}</code>").format(each) if n % 2 else each for n, each in enumerate(parts))


def sentence(clause: str) -> str:
    """Return a clause as a sentence, as far as its first letter and its end go."""
    words = clause.strip()
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")
