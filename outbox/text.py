"""Texts for people, and texts that the database takes: an error that can't be stored would hold up its row for ever."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import socket
import sys
import traceback
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sqlalchemy import URL

_SUMMARY_CHARS = 1000
_TRACE_CHARS = 4000
_KIND_CHARS = 200
_SHOWN = 10
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")

#: What differs between two errors of one kind: words with a digit in them, and what is quoted.
_VARIABLE = re.compile(r"""'[^']*'|"[^"]*"|[^\s,;:()\[\]{}=]*\d[^\s,;:()\[\]{}=]*""")
_OURS = str(Path(__file__).parent)
#: What of SQLAlchemy's lies between this package and an async function of the application's.
_GREENLETS = re.compile(r".*[/\\]sqlalchemy[/\\]util[/\\]_?concurrency")


def storable(value: object) -> str:
    """Return the value as a text without what PostgreSQL refuses."""
    return str(value).replace("\0", "").encode("utf-8", "backslashreplace").decode()


def process_name() -> str:
    """Return what tells this process from others: in the list of workers, the histories of checks and of attempts."""
    return storable(f"{socket.gethostname()}:{os.getpid()}")


def summary_of(error: BaseException) -> str:
    """Return an exception's type and message, without rejected values, cut to a length that is fit to be shown."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return storable(_without_values(text, error))[:_SUMMARY_CHARS]


def why_invalid(error: BaseException) -> str:
    """Return what is wrong with a body: of pydantic's errors each field and its rule, without the value.

    A value may be somebody's secret, and the text goes into logs and the inbox.
    """
    if not _is_of_pydantic(error):
        return str(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)  # type: ignore[attr-defined]  # pydantic is optional
    shown = [f"{'.'.join(map(str, each['loc'])) or 'the whole'}: {each['msg']}" for each in found[:_SHOWN]]
    return "; ".join(shown) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _is_of_pydantic(error: BaseException) -> bool:
    # Whoever raises one has imported it.
    pydantic_core = sys.modules.get("pydantic_core")
    return pydantic_core is not None and isinstance(error, pydantic_core.ValidationError)


def _without_values(text: str, error: BaseException) -> str:
    """Return a text about an exception; where it quotes pydantic's errors, by `why_invalid`, which has no values.

    They may be in its own message, in that of what caused it, or in a group, where each line is indented.
    """
    for each in _chain(error):
        if _is_of_pydantic(each):
            lines = map(re.escape, str(each).splitlines())
            # A backslash in it must stay one.
            text = re.sub(r"\n[ |]*".join(lines), why_invalid(each).replace("\\", "\\\\"), text)
    return text


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception and all that are behind it, each once, also where they go in a circle."""
    chain = [error]
    for each in chain:  # which grows meanwhile
        for behind in (each.__cause__, each.__context__, *getattr(each, "exceptions", ())):
            if behind is not None and all(behind is not other for other in chain):
                chain.append(behind)
    return chain


def plain(text: str) -> str:
    """Return a text with control characters written out: what is in a message must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def duration(seconds: float) -> str:
    """Return a duration for people: ``4.2s``, ``3m10s``, ``5h07m``, ``2d04h``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, second = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{second:02}s"
    hours, minute = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minute:02}m"
    return f"{hours // 24}d{hours % 24:02}h"


def database_address(url: URL) -> str:
    """Return which database this is, without user, password and options: ``host:5432/shop``."""
    return f"{url.host or 'local'}:{url.port or 5432}/{url.database}"


def described(url: URL, schema: str) -> str:
    """Return which database and schema is meant, in words."""
    return f"database {url.database!r} on {url.host or 'the local socket'}, schema {schema!r}"


def function_name(function: Callable[..., object]) -> str:
    """Return what a function is called, with its module; of another callable object, what its class is called."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}" if named.__module__ else named.__qualname__


def sql_list(words: Iterable[str]) -> str:
    """Return words of ours as what ``IN`` takes in SQL: ``('a', 'b')``."""
    return "({})".format(", ".join(map("'{}'".format, words)))


def counted(count: int, one: str, several: str | None = None) -> str:
    """Return a number with its noun, whose plural has an s by default: ``no rows``, ``1 half``, ``1,200 halves``."""
    return f"{f'{count:,}' if count else 'no'} {one if count == 1 else several or f'{one}s'}"


def key_text(key: Iterable[str | None]) -> str:
    """Return the parts of a key in one line: ``NULL`` where there is none, and ``"NULL"`` where a text says so."""
    return ", ".join("NULL" if part is None else '"NULL"' if part == "NULL" else part for part in key)


def error_text(error: BaseException) -> str:
    """Return an exception's summary, an empty line, and the end of its traceback."""
    text = storable(_without_values("".join(traceback.format_exception(error)), error))
    return f"{summary_of(error)}\n\n{text[-_TRACE_CHARS:]}"


def csv_cell(value: object) -> str:
    """Return a value for a cell of a CSV file that no spreadsheet takes for a formula (OWASP, "CSV Injection").

    Nothing is an empty cell, a time is in UTC by ISO 8601; truth values, dicts and lists are JSON. A text which begins
    like a formula gets a quote before it; numbers never do.
    """
    if value is None:
        return ""
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat()
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, bool | dict | list) else str(value)
    return f"'{text}" if text.startswith(_FORMULA) and not isinstance(value, int | float) else text


def kind_of_error(error: BaseException) -> str:
    """Return what errors with one cause have in common: the class, and the innermost function of the application.

    Without line numbers, so that the next release of the application doesn't make a new kind of the old trouble.
    """
    code = _innermost(error.__traceback__)
    where = f" in {Path(code.co_filename).name}:{code.co_qualname}" if code else ""
    # SQLAlchemy's errors are few, and say less than the driver's inside them.
    original = getattr(error, "orig", None) or error
    constraint = getattr(getattr(original, "diag", None), "constraint_name", None)
    what = type(original).__qualname__ + (f" of {constraint}" if constraint else "")
    return storable(f"{what}{where}")[:_KIND_CHARS]


def kind_of_text(text: str) -> str:
    """Return what texts with one cause have in common: the first line, without numbers, ids and what is quoted."""
    first = text.lstrip().partition("\n")[0][:_SUMMARY_CHARS]
    return _VARIABLE.sub("…", first)[:_KIND_CHARS]


def _innermost(trace: TracebackType | None) -> CodeType | None:
    """Return the innermost function beside the handler's own code, which is where a trace leaves this package first."""
    codes = []
    while trace is not None:
        codes.append(trace.tb_frame.f_code)
        trace = trace.tb_next
    between = [code for code in codes if code.co_filename.startswith(_OURS) or _GREENLETS.match(code.co_filename)]
    theirs = [code for code in codes if code not in between] or codes
    home = str(Path(theirs[0].co_filename).parent) if theirs else ""
    return next((code for code in reversed(theirs) if code.co_filename.startswith(home)), None)


def write_whole(path: Path, text: str) -> None:
    """Write a file at once and whole: a temporary file beside it is renamed."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
