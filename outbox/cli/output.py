"""What leaves the process: data on stdout, sentences and progress on stderr, and the exit code, which errors lead to.

Data come as tables for people, or as JSON, CSV or ids for programs; control characters in them never steer a terminal.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime as dt
import enum
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from sqlalchemy.exc import DBAPIError

from outbox.database.execute import kind_of
from outbox.errors import ErrorKind, InvalidMessage, pip_install, was_interrupted, without_secrets
from outbox.message import content
from outbox.reader import plain as as_json
from outbox.text import csv_cell, duration, message_of, plain

if TYPE_CHECKING:
    from outbox.message.content import Codecs
    from outbox.operator.model import Total


class Code(enum.IntEnum):
    """Number the exit codes of the process; ``meaning`` is for the help text."""

    DONE = 0, "done"
    FAILED = 1, "failed"
    USAGE = 2, "wrong usage, or refused"
    NOT_FOUND = 3, "not found"
    CONFLICT = 4, "conflict: the state doesn't allow it, or another actor was first"
    PARTIAL = 5, "done in part: some of the named things failed, or are missing"
    PROBLEMS = 6, "a check found problems; of `reconcile`: differences are left"
    UNAVAILABLE = 69, "the database is unavailable"
    NO_RESULT = 70, "`reconcile` came to no result"
    CONFIG = 78, "bad configuration: URL, settings, --app, or a database that isn't migrated"
    INTERRUPTED = 130, "interrupted"

    meaning: str

    def __new__(cls, number: int, meaning: str) -> Code:
        """Return the code of a number, with its meaning."""
        code = int.__new__(cls, number)
        code._value_, code.meaning = number, meaning
        return code


class Failure(Exception):
    """An error to tell the user in one line, which any command may raise: wrong usage, unless ``code`` differs."""

    def __init__(self, message: str, code: Code = Code.USAGE) -> None:
        super().__init__(without_secrets(message))
        self.code = code


#: The exit code of each kind of error that isn't just `FAILED`.
_CODES = {
    ErrorKind.USAGE: Code.USAGE,
    ErrorKind.REFUSED: Code.USAGE,
    ErrorKind.TOO_LARGE: Code.USAGE,
    ErrorKind.SETTINGS: Code.CONFIG,
    ErrorKind.SCHEMA: Code.CONFIG,
    ErrorKind.NOT_FOUND: Code.NOT_FOUND,
    ErrorKind.CONFLICT: Code.CONFLICT,
    ErrorKind.STALE: Code.CONFLICT,
    ErrorKind.BUSY: Code.CONFLICT,
    ErrorKind.UNAVAILABLE: Code.UNAVAILABLE,
    ErrorKind.NO_RESULT: Code.NO_RESULT,
}

#: The command line's words for the database's error, around the database's own words.
_DATABASE_SAYS = {
    ErrorKind.UNAVAILABLE: "the database is unavailable: {}",
    ErrorKind.CONFLICT: "another transaction holds a lock: {}; try again in a while",
    ErrorKind.TIMEOUT: "{}; narrow down what to look for",
}


def as_failure(error: Exception) -> Failure | None:
    """Return the line and the exit code of an error; None for an unexpected one: its traceback is the best message."""
    if isinstance(error, Failure):
        return error
    kind = kind_of(error)
    if kind is None:
        return None
    text = one_line(message_of(error))
    if isinstance(error, DBAPIError):
        if was_interrupted(error):
            return Failure("interrupted", Code.INTERRUPTED)
        text = _DATABASE_SAYS.get(kind, "the database refused: {}").format(one_line(str(error.orig)))
    return Failure(text, _CODES.get(kind, Code.FAILED))


def if_away(error: Exception) -> Failure:
    """Return the failure of a database that is away for now; any other error is raised again."""
    failure = as_failure(error)
    if failure is None or failure.code is not Code.UNAVAILABLE:
        raise error
    return failure


def one_line(text: str) -> str:
    """Return a text without line breaks."""
    return " ".join(text.split())


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Say which extra is to be installed where one of its libraries isn't there."""
    try:
        yield
    except ImportError as error:
        missing = error.name or ""
        if missing.startswith("outbox"):
            raise
        raise Failure(f"{what} needs {missing or error}; {pip_install(extra)}", Code.CONFIG) from error


T = TypeVar("T")


class Output(enum.StrEnum):
    """The forms of a document on stdout."""

    TABLE = enum.auto()
    JSON = enum.auto()


class ListForm(enum.StrEnum):
    """The forms of a list on stdout."""

    TABLE = enum.auto()
    JSON = enum.auto()
    NDJSON = enum.auto()
    CSV = enum.auto()
    ID = enum.auto()


class ExportForm(enum.StrEnum):
    """The forms of an export on stdout."""

    NDJSON = enum.auto()
    CSV = enum.auto()


FORM_HELP = "The form of the data on stdout."
LIST_FORM_HELP = f"{FORM_HELP} ndjson: a JSON object a line; id: only ids."
OutputOption = Annotated[Output, typer.Option("--output", "-o", help=FORM_HELP)]
ListFormOption = Annotated[ListForm, typer.Option("--output", "-o", help=LIST_FORM_HELP)]
ExportFormOption = Annotated[ExportForm, typer.Option("--output", "-o", help=LIST_FORM_HELP.partition(";")[0] + ".")]

# Where stdout is no terminal, lines may be as long as they are.
_WIDE = 10_000


def say(text: str) -> None:
    """Print a sentence on stderr."""
    print(plain(text), file=sys.stderr)  # noqa: T201 - where commands print


def print_line(text: str) -> None:
    """Print one line of data."""
    print(plain(text))  # noqa: T201 - where commands print


def print_json(value: Any) -> None:
    """Print one JSON value on one line."""
    print(json.dumps(as_json(value), ensure_ascii=False), flush=True)  # noqa: T201 - where commands print


def print_as(form: Output, document: Any, *tables: Table) -> None:
    """Print a document as JSON, or the tables that show it."""
    if form is Output.JSON:
        print_json(document)
    else:
        print_table(*tables)


def console() -> Console:
    """Return the console of stdout."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDE)


def print_table(*tables: Table) -> None:
    """Print tables; as wide as they are if stdout is no terminal."""
    terminal = console()
    for each in tables:
        terminal.print(each)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Table:
    """Return rows as a table; a column name that ends with ``>`` is aligned to the right."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell(value)) for value in row))
    return result


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Return facts as a table of two columns, without those that are None or empty."""
    return table(
        (title, ""), [(name.replace("_", " "), value) for name, value in facts.items() if value not in (None, {}, [])]
    )


def cell(value: Any) -> str:
    """Return a value as text in a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    if isinstance(value, dict | list):
        return plain(json.dumps(as_json(value), ensure_ascii=False))
    return plain(str(value))


def age(seconds: float | None) -> str:
    """Return a duration for people, see `duration`; nothing for None."""
    return "" if seconds is None else duration(seconds)


def first_line(text: str | None) -> str:
    """Return the first line of an error, without its traceback."""
    return (text or "").partition("\n")[0]


def at_least(total: Total) -> str:
    """Return a count; ``10000+`` where that is the least."""
    return f"{total.value}{'+' if total.relation == 'gte' else ''}"


def readable(content_type: str, raw: bytes, codecs: Codecs) -> Any:
    """Return a body decoded by its content type; where it has no text form, its length and digest."""
    digest = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    try:
        text = codecs.as_json(raw, content_type)
        decoded = content.decode(raw, content_type) if text is None else json.loads(text)
    except InvalidMessage as error:
        return {**digest, "error": str(error)}
    return digest if isinstance(decoded, bytes) else decoded


def rows_table(
    columns: str, rows: Iterable[Any], title: str | None = None, /, **computed: Callable[[Any], Any]
) -> Table:
    """Return rows as a table.

    ``columns`` are names of fields (``heading=field`` under another heading; ``>`` aligns to the right), or of those in
    ``computed``, which are functions of the row.
    """
    parts = [column.rpartition("=") for column in columns.split()]
    names = [name.rstrip(">") for _, _, name in parts]
    cells = (
        [
            computed[name](row) if name in computed else row[name] if isinstance(row, dict) else getattr(row, name)
            for name in names
        ]
        for row in rows
    )
    return table([(heading or name).replace("_", " ") for heading, _, name in parts], cells, title)


@dataclass(frozen=True, slots=True)
class RowShape(Generic[T]):
    """How rows are shown: all fields for programs, columns for people, as `rows_table` has them.

    ``kind`` is their dataclass, which declares the ``columns``. ``id_of`` is what ``-o id`` prints.
    """

    kind: type[T]
    computed: Mapping[str, Callable[[T], Any]] = dataclasses.field(default_factory=dict)
    id_of: Callable[[T], object] = attrgetter("id")

    @property
    def names(self) -> list[str]:
        """The fields of each row."""
        kind: Any = self.kind
        return [field.name for field in dataclasses.fields(kind)]

    @property
    def columns(self) -> str:
        """The columns of a table."""
        kind: Any = self.kind
        return str(kind.columns)


def print_rows(rows: Sequence[T], shape: RowShape[T], form: ListForm, *, databases: bool = False) -> None:
    """Print rows as a table (with their databases, if there are several), as JSON, CSV, or their ids."""
    if form is ListForm.JSON:
        print_json({"items": rows})
    elif form is ListForm.TABLE:
        print_table(rows_table(shape.columns + " database" * databases, rows, **shape.computed))
    elif form is ListForm.ID:
        for row in rows:
            print_line(str(shape.id_of(row)))
    else:
        print_stream(map(as_json, rows), shape.names, ExportForm(form.value))


def print_stream(rows: Iterable[Mapping[str, Any]], names: Sequence[str], form: ExportForm) -> int:
    """Print rows as they come, as CSV with a header or as lines of JSON; return how many there were."""
    count, terminal = 0, sys.stdout.isatty()
    writer = csv.writer(sys.stdout)
    if form is ExportForm.CSV:
        writer.writerow(names)
    for count, row in enumerate(rows, 1):  # noqa: B007 - it counts after the loop
        if form is ExportForm.CSV:
            values = (row.get(name) for name in names)
            texts = (plain(value) if terminal and isinstance(value, str) else value for value in values)
            writer.writerow(map(csv_cell, texts))
        else:
            print_json(row)
    return count


class Bars(Progress):
    """Progress on stderr from the first moment: sentences always, bars on a terminal, which are gone in the end."""

    def __init__(self) -> None:
        stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=stderr,
            transient=True,
            disable=not stderr.is_terminal,
        )
        self.stage("begins", None)

    def stage(self, title: str, total: int | None) -> None:
        """Show a stage in place of the one before."""
        for task in self.task_ids:
            self.remove_task(task)
        self.add_task(plain(title), total=total)

    def done(self, steps: int) -> None:
        """Show how much of the stage is done."""
        for task in self.task_ids:
            self.update(task, completed=steps)

    def say(self, sentence: str) -> None:
        """Show a sentence above the bar."""
        self.console.print(plain(sentence))
