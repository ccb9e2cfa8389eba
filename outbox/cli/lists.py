"""Lists: from pages to a table, JSON, CSV or ids on stdout."""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from outbox.cli.output import Form, print_json, print_table, say, table
from outbox.operator.model import MAX_PAGE, Page, PageRequest, Total
from outbox.text import csv_cell, plain

if TYPE_CHECKING:
    from outbox.cli.arguments import Listing
    from outbox.operator.service import Admin

T = TypeVar("T")

#: How many rows a list looks at that don't fit, before it says where to go on.
SEARCHED = 100_000


@dataclass(frozen=True, slots=True)
class Shape(Generic[T]):
    """How rows of one kind are shown: all fields, or these columns for people (``>``: aligned to the right)."""

    kind: type[T]
    columns: Sequence[str]
    cells: Callable[[T], Sequence[Any]]
    id_of: Callable[[T], object]

    def fields(self, row: T) -> dict[str, Any]:
        """Return a row as what JSON can hold."""
        return dataclasses.asdict(row)  # type: ignore[call-overload,no-any-return]

    @property
    def names(self) -> list[str]:
        """The fields that each row has."""
        return [field.name for field in dataclasses.fields(self.kind)]  # type: ignore[arg-type]


def taken(fetch: Callable[[PageRequest], Page[T]], limit: int, token: str | None) -> Page[T]:
    """Return so many rows as one page, from as many pages as it takes, or until it has searched through `SEARCHED`."""
    items: list[T] = []
    total, searched = None, 0
    while True:
        page = fetch(PageRequest(min(MAX_PAGE, limit - len(items)), token))
        items += page.items
        total = total or page.total
        searched += page.searched or 0
        token = page.next_page_token
        if token is None or len(items) >= limit or searched >= SEARCHED:
            complete = token is None or len(items) >= limit
            return Page(items, token, total, complete, None if complete else searched)


def every(fetch: Callable[[PageRequest], Page[T]], limit: int | None = None) -> Iterator[T]:
    """Yield the rows of all pages, the first ``limit`` of them if given."""
    token, left = None, limit
    while left is None or left > 0:
        page = fetch(PageRequest(MAX_PAGE if left is None else min(MAX_PAGE, left), token))
        yield from page.items
        left = None if left is None else left - len(page.items)
        token = page.next_page_token
        if token is None:
            return


def print_page(page: Page[T], shape: Shape[T], listing: Listing, admin: Admin, *, what: str) -> None:
    """Print a page in the form that was asked for, and tell on stderr how to go on."""
    if listing.output is Form.JSON:
        whole = {field.name: getattr(page, field.name) for field in dataclasses.fields(page)}
        total = page.total and dataclasses.asdict(page.total)
        print_json(whole | {"items": [shape.fields(row) for row in page.items], "total": total})
        return
    print_rows(page.items, shape, listing.output, databases=len(admin.databases) > 1)
    if page.next_page_token is None:
        return
    if page.complete:
        known = f"{len(page.items)} of {at_least(page.total)}; " if page.total else ""
        say(f"{known}there may be more: --after {page.next_page_token}")
    else:
        say(f"looked at {page.searched or 0} {what}; to search further: --after {page.next_page_token}")


def print_rows(rows: Sequence[T], shape: Shape[T], form: Form, *, databases: bool = False) -> None:
    """Print rows as a table (with their databases, if there are several), as CSV, as lines of JSON, or their ids."""
    if form is Form.TABLE:
        columns = [*shape.columns, "database"] if databases else shape.columns
        cells = [[*shape.cells(row), row.database] if databases else shape.cells(row) for row in rows]  # type: ignore[attr-defined]
        print_table(table(columns, cells))
    elif form is Form.ID:
        for row in rows:
            print(plain(str(shape.id_of(row))))  # noqa: T201
    else:
        print_stream(map(shape.fields, rows), shape.names, csv_=form is Form.CSV)


def print_stream(rows: Iterable[dict[str, Any]], names: Sequence[str], *, csv_: bool) -> int:
    """Print rows as they come, as CSV with a header or as lines of JSON; return how many there were."""
    count = 0
    writer = csv.writer(sys.stdout)
    if csv_:
        writer.writerow(names)
    for count, row in enumerate(rows, 1):  # noqa: B007
        if csv_:
            writer.writerow([_cell(row.get(name)) for name in names])
        else:
            print_json(row)
    return count


def at_least(total: Total) -> str:
    """Return how many there are; ``10000+`` where that is the least."""
    return f"{total.value}{'+' if total.relation == 'gte' else ''}"


def _cell(value: Any) -> str:
    return csv_cell(plain(value) if isinstance(value, str) and sys.stdout.isatty() else value)
