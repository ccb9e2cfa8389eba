"""Groups of commands on one kind of thing, and the commands that are made from them: lists and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import typer

from outbox.cli.database import DatabasesOptions, now_at
from outbox.cli.exits import Code, Failure
from outbox.cli.options import PageOptions, UpToOption, as_id, gathered, options_of, read_filter, targets_of, words_of
from outbox.cli.output import (
    ExportForm,
    ExportFormOption,
    ListForm,
    RowShape,
    at_least,
    print_json,
    print_rows,
    print_stream,
    say,
)
from outbox.operator.model import MAX_PAGE, Page, PageRequest, Target

if TYPE_CHECKING:
    from outbox.operator.operator import Operator

Row = TypeVar("Row")

#: How many rows a list searches through that the filter leaves out, before it says where to go on.
SEARCHED = 100_000


@dataclass(frozen=True, slots=True)
class CommandGroup(Generic[Row]):
    """A group of commands on one kind of thing: how it is listed, and how messages are picked for an act.

    ``name`` is that of the group, ``plural`` what its rows are called; the operator's ``method`` returns a page of
    them. ``part`` is that of the databases in which they are, None for both. ``fixed`` are values of the filter without
    an option, ``defaults`` those of options that aren't given, ``hidden`` further fields without an option.

    Where acts can be done: ``noun`` is what they are done to, ``states`` keeps those that can't begin in any of these
    states out of the group, and ``target_of`` makes a target of a row.
    """

    name: str
    plural: str
    kind: type[Any]
    shape: RowShape[Row]
    method: str
    part: Literal["producer", "consumer"] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    noun: Literal["message", "half", "inbox"] | None = None
    target_of: Callable[[Row], Target] = lambda row: Target(row.id)  # type: ignore[attr-defined]
    states: frozenset[str] | None = None

    def options(self, *hidden: str) -> type:
        """Return the dataclass of the filter's options."""
        return options_of(self.kind, frozenset({"database", *self.hidden, *self.fixed, *hidden}))

    def filter_of(self, values: Mapping[str, Any], database: str | None) -> Any:
        """Return the filter of values that were read."""
        return self.kind(**{"database": database, **self.defaults, **self.fixed, **values})

    def page(self, operator: Operator, criteria: Any, request: PageRequest) -> Page[Row]:
        """Return a page of a filter."""
        return getattr(operator, self.method)(criteria, request)  # type: ignore[no-any-return]

    def rows(self, operator: Operator, criteria: Any, limit: int | None = None) -> Iterator[Row]:
        """Return all rows of a filter, page by page, the first ``limit`` of them if given."""
        return every(lambda page: self.page(operator, criteria, page), limit)

    def targets(self, words: Sequence[str], group: str | None) -> tuple[Target, ...]:
        """Return the messages that words of the command line name, each once; those of stdin in place of ``-``.

        Raises:
            Failure: a word is no id, or has no group where one is needed.
        """
        found = words_of(words)
        if self.noun == "inbox":
            return tuple(targets_of(found, group))
        # A group before an id (GROUP/ID), as lists of inboxes have it, doesn't matter here.
        return tuple(dict.fromkeys(Target(as_id(text.rpartition("/")[2])) for text in found))


def every(fetch: Callable[[PageRequest], Page[Row]], limit: int | None = None) -> Iterator[Row]:
    """Yield the rows of all pages, the first ``limit`` of them if given."""
    token, left = None, limit
    while left is None or left > 0:
        page = fetch(PageRequest(MAX_PAGE if left is None else min(MAX_PAGE, left), token))
        yield from page.items
        left = None if left is None else left - len(page.items)
        token = page.next_page_token
        if token is None:
            return


def add_list(app: typer.Typer, group: CommandGroup[Any], help_: str, name: str = "list") -> None:
    """Add the command that lists a page, in each form."""

    def show_list(choice: Any, page: PageOptions, databases: DatabasesOptions) -> None:
        with databases.opened() as operator:
            if group.part and not operator.databases.having(group.part, databases.only):
                other = "consumer" if group.part == "producer" else "producer"
                there = ", ".join(str(database.engine.url) for database in operator.databases.values())
                raise Failure(
                    f"only the {other}'s tables are in {there}; name the {group.part}'s database", Code.CONFIG
                )
            read = read_filter(group.kind, choice, lambda: now_at(operator), page.after)
            criteria = group.filter_of(read.values, databases.only)
            found = read.onward(page_of(lambda each: group.page(operator, criteria, each), page.limit, read.token))
            if page.output is ListForm.JSON:
                print_json(found)
                return
            print_rows(found.items, group.shape, page.output, databases=len(operator.databases) > 1)
            if found.next_page_token:
                say(f"{_shown(found, group.plural)}: --after {found.next_page_token}")

    app.command(name, help=help_)(gathered(show_list, choice=group.options()))


def add_export(app: typer.Typer, group: CommandGroup[Any], help_: str) -> None:
    """Add the command that exports all there is, as it comes."""

    def export(
        choice: Any,
        databases: DatabasesOptions,
        limit: UpToOption = None,
        output: ExportFormOption = ExportForm.NDJSON,
    ) -> None:
        with databases.opened() as operator:
            rows = map(group.shape.document, all_rows(operator, databases, group, choice, limit))
            say(f"{print_stream(rows, group.shape.names, output)} {group.plural}")

    app.command("export", help=help_)(gathered(export, choice=group.options()))


def all_rows(
    operator: Operator, databases: DatabasesOptions, group: CommandGroup[Any], choice: Any, limit: int | None
) -> Iterator[Any]:
    """Return all rows that the options of a filter pick, the first ``limit`` of them if given."""
    read = read_filter(group.kind, choice, lambda: now_at(operator))
    return group.rows(operator, group.filter_of(read.values, databases.only), limit)


def page_of(fetch: Callable[[PageRequest], Page[Any]], limit: int, token: str | None) -> Page[Any]:
    """Return so many rows as one page, from as many pages as it takes, or until it has searched through `SEARCHED`."""
    items: list[Any] = []
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


def _shown(page: Page[Any], plural: str) -> str:
    if not page.complete:
        return f"searched {page.searched or 0} {plural}; to search further"
    known = f"{len(page.items)} of {at_least(page.total)}; " if page.total else ""
    return f"{known}there may be more"
