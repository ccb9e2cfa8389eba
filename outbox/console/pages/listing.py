"""A list on a page: its filter, which is in the URL, and how one turns its pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlencode

from outbox.admin.model import MAX_PAGE, Page, PageRequest
from outbox.console.pages.fields import SPANS, Fields, fixed
from outbox.errors import InvalidRequest, UnknownDatabase

if TYPE_CHECKING:
    from starlette.requests import Request

    from outbox.console.console import Console

T = TypeVar("T")

#: Rows on a page, if nobody says otherwise, and how many pages one can go back.
ROWS = 50
_TRAIL = 20
_FIRST = "first"


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A page of a list with its filter.

    ``values`` are those of the filter's fields, ``applied`` is for each of them its name, its text and the URL without
    it. ``before`` and ``after`` are the URLs of the pages beside this one. ``filter`` selects the same rows again, for
    an operation on all of them. ``fault`` tells what is wrong with the filter; then there are no rows.
    """

    of: str
    page: Page[T]
    values: Mapping[str, Any]
    applied: list[tuple[str, str, str]]
    clear: str
    first: str | None
    before: str | None
    after: str | None
    filter: str
    fault: str | None = None

    @property
    def status(self) -> int:
        """The HTTP status of the page."""
        return 422 if self.fault else 200


def listing(
    console: Console,
    request: Request,
    of: str,
    labels: Mapping[str, str],
    fetch: Callable[[Fields, PageRequest], Page[T]],
    *,
    given: Mapping[str, str] | None = None,
) -> Listing[T]:
    """Return the page of a list that the URL asks for.

    ``labels`` names the fields of its filter, those without a text are no part of what can be cleared. ``given`` are
    fields that the page sets itself.
    """
    everything = Fields.of_query(request.url.query)
    asked = everything.only(list(labels))
    wanted = Fields([*asked.pairs(), *(given or {}).items()])
    fault = None
    try:
        size = everything.count("size", least=1, most=MAX_PAGE) or ROWS
        page = fetch(wanted, PageRequest(size, everything.text("after")))
        selector = fixed(wanted).query()
    except (InvalidRequest, UnknownDatabase) as error:
        fault, page, size, selector = str(error), Page([]), ROWS, ""
    here = console.path(request, *console.facts(request).path.strip("/").split("/"))
    turn = _Turn(here, asked, {"size": str(size)} if size != ROWS else {}, everything.texts("trail")[-_TRAIL:])
    return Listing(
        of,
        page,
        _values(asked),
        [
            (labels[name], _text(name, value), turn.to(asked.without(name, value)))
            for name, value in asked.pairs()
            if labels[name]
        ],
        turn.to(Fields([pair for pair in asked.pairs() if not labels[pair[0]]])),
        turn.to(asked) if everything.text("after") else None,
        turn.back(),
        turn.on(everything.text("after"), page.next_page_token),
        selector,
        fault,
    )


@dataclass(frozen=True, slots=True)
class _Turn:
    """Makes the URLs of other pages of the same list. ``trail`` are the tokens of the pages before this one."""

    here: str
    asked: Fields
    size: Mapping[str, str]
    trail: tuple[str, ...]

    def to(self, fields: Fields, *more: tuple[str, str]) -> str:
        pairs = [*fields.pairs(), *self.size.items(), *more]
        return self.here + (f"?{urlencode(pairs)}" if pairs else "")

    def back(self) -> str | None:
        if not self.trail:
            return None
        *rest, last = self.trail
        token = [] if last == _FIRST else [("after", last)]
        return self.to(self.asked, *token, *(("trail", each) for each in rest))

    def on(self, current: str | None, following: str | None) -> str | None:
        if following is None:
            return None
        trail = [*self.trail, current or _FIRST][-_TRAIL:]
        return self.to(self.asked, ("after", following), *(("trail", each) for each in trail))


def _values(fields: Fields) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in fields.pairs():
        if name == "status":
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    return values


def _text(name: str, value: str) -> str:
    return SPANS[value][0] if name == "within" and value in SPANS else value
