"""Texts for people, and texts that the database takes: an error that can't be stored would hold up its row for ever."""

from __future__ import annotations

import dataclasses
import datetime as dt
import inspect
import json
import os
import re
import socket
import sys
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias
from urllib.parse import quote, quote_plus
from uuid import UUID, uuid4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sqlalchemy import URL

#: What is put where a value was masked.
MASK = "***"

_SUMMARY_CHARS = 1000
# Of a text so much is searched for secrets: of the rest nothing is shown.
SEARCHED_CHARS = 64 * 1024
_TRACE_CHARS = 4000
_KIND_CHARS = 200
_SHOWN = 10
_VALUE_CHARS = 200
_MOST_BEHIND = 1000
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")

#: What differs between two errors of one kind: words with a digit in them, and what is quoted.
_VARIABLE = re.compile(r"""'[^']*'|"[^"]*"|[^\s,;:()\[\]{}=]*\d[^\s,;:()\[\]{}=]*""")
_OURS = str(Path(__file__).parent)
#: What of SQLAlchemy's lies between this package and an async function of the application's.
_GREENLETS = re.compile(r".*[/\\]sqlalchemy[/\\]util[/\\]_?concurrency")


def storable(value: object) -> str:
    """Return the value as a text without what PostgreSQL refuses."""
    return str(value).replace("\0", "").encode("utf-8", "backslashreplace").decode()


def cut(text: str, most: int) -> str:
    """Return a text of at most so many characters; an ellipsis tells that there was more."""
    return text if len(text) <= most else text[: most - 1] + "…"


def process_name() -> str:
    """Return what tells this process from others, in lists and histories; in ASCII, which all databases can store."""
    return f"{socket.gethostname()}:{os.getpid()}".encode("ascii", "backslashreplace").decode()


def class_name(value: object) -> str:
    """Return what a class, or that of a value, is called, whatever its metaclass says."""
    kind = value if issubclass(type(value), type) else type(value)
    return str(type.__dict__["__qualname__"].__get__(kind))


def shown(value: object) -> str:
    """Return a value and its type as errors show it, cut; never raise, whatever the value's own code does."""
    kind = "" if value is None else f" ({class_name(value)})"
    try:
        return cut(storable(repr(value)), _VALUE_CHARS) + kind
    except BaseException:  # as `traceback` does
        return f"a value that can't be shown{kind}"


def message_of(error: BaseException) -> str:
    """Return what an exception says; never raise, whatever its own code does."""
    try:
        return storable(str(error))
    except BaseException:  # as `traceback` does
        return "its text can't be read: its own code raises"


def named(error: BaseException) -> str:
    """Return an exception's class and what it says; never raise."""
    return f"{class_name(error)}: {message_of(error)}"


def summary_of(error: BaseException, secrets: Collection[str] = ()) -> str:
    """Return an exception's type and message, without rejected values and secrets, cut to what is fit to be shown.

    Never raise, here and wherever an exception is described, whatever its class does with the attributes of exceptions.
    """
    text = _formatted(error, traceback.format_exception_only).strip()
    return cut(without(text[:SEARCHED_CHARS], secrets), _SUMMARY_CHARS)


def why_invalid(error: BaseException) -> str:
    """Return what is wrong with a body: of pydantic's errors each field and its rule, without the value.

    A value may be a secret, and the text goes into logs and the inbox.
    """
    if not _is_of_pydantic(error):
        return message_of(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)  # type: ignore[attr-defined]  # pydantic is optional
    rules = [f"{'.'.join(map(str, each['loc'])) or 'the whole'}: {each['msg']}" for each in found[:_SHOWN]]
    return "; ".join(rules) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _is_of_pydantic(error: BaseException) -> bool:
    # Code that raises one has imported it.
    pydantic_core = sys.modules.get("pydantic_core")
    return pydantic_core is not None and issubclass(type(error), pydantic_core.ValidationError)


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


def _formatted(error: BaseException, form: Callable[[BaseException], list[str]]) -> str:
    """Return an exception as Python shows it, without values; more plainly where its class breaks that."""
    with suppress(BaseException):  # as `traceback` does, here and below: it may be an exception's own code
        if all(map(_is_plain, _chain(error))):
            return storable(_without_values("".join(form(error)), error))
    trace = traceback.format_tb(_own(error, "__traceback__")) if form is traceback.format_exception else []
    with suppress(BaseException):  # its values can't be taken out: then nothing of it is shown
        return storable(_without_values("".join([*trace, named(error)]), error))
    return storable("".join([*trace, class_name(error)]))


def _own(error: BaseException, name: str) -> Any:
    """Return what Python has written into an exception, also where its class has put something else before it."""
    return BaseException.__dict__[name].__get__(error)


def _is_plain(error: BaseException) -> bool:
    """Tell whether Python can look behind an exception without running its class's code, which may have no end."""
    names = "__cause__", "__context__", "__traceback__", "__getattribute__"
    return all(inspect.getattr_static(error, name) is BaseException.__dict__[name] for name in names)


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception and all that are behind it, each once, also where they go in a circle."""
    chain, found_ids = [error], {id(error)}
    for each in chain:  # which grows meanwhile
        behind = [_own(each, "__cause__"), _own(each, "__context__")]
        with suppress(BaseException):
            # A group's, or what another class calls so: anything, and perhaps other ones each time.
            members = each.exceptions  # type: ignore[attr-defined]
            behind += members if isinstance(members, list | tuple) else []
        for other in behind:
            if issubclass(type(other), BaseException) and id(other) not in found_ids and len(chain) < _MOST_BEHIND:
                found_ids.add(id(other))
                chain.append(other)
    return chain


def tellable(error: BaseException) -> BaseException:
    """Return an exception that a log can format: the same, or what says of it what can be said."""
    with suppress(BaseException):  # so the log would fail
        if all(map(_is_plain, _chain(error))) and traceback.format_exception(error):
            return error
    return RuntimeError(summary_of(error)).with_traceback(_own(error, "__traceback__"))


def plain(text: str) -> str:
    """Return a text with control characters written out: what is in a message must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def duration(seconds: float) -> str:
    """Return a duration for people: ``250ms``, ``4.2s``, ``3m10s``, ``5h07m``, ``2d04h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
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
    return f"{_host(url) or 'local'}:{url.port or 5432}/{url.database}"


def _host(url: URL) -> str:
    """Return the host of a URL; what lies before an @ in it is the tail of a password."""
    return (url.host or "").rpartition("@")[2]


_HEX, _QUAD = r"[\da-fA-F]{1,4}", r"\d{1,3}(?:\.\d{1,3}){3}"
# An ellipsis is written as an escape: not each database's encoding has it.
_QUOTED = r"""(?:"[^"\u2026]*(?:["\u2026]|\Z)|'[^'\u2026]*(?:['\u2026]|\Z))"""
#: Addresses of databases: URLs, ``host:5432/shop``, IP addresses, what libpq, psycopg and asyncio say of hosts, ports
#: and users, and the same in a connection string. Where a text was cut (`cut`), the end may be the beginning of one.
#: What the first group finds is kept. PostgreSQL searches by it, too.
# Each begins where no other could have, and has one way only to go on: else a long word would be tried from each of its
# letters on, or in each way to part it.
ADDRESS = re.compile(
    r"""(?:'|(?<![\w+]))[\w+]+://\S+|(?<![\w.\[\]:-])[\w.\[\]:-]+:\d{3,5}/[\w%-]+"""
    r"""|(?<![\w.-])[\w-]+(?:\.[\w-]+)+:\d{4,5}(?!\w)"""
    rf"""|(?<![\w:])(?=[\da-fA-F:.]{{0,45}}\d)(?:{_HEX}(?::{_HEX}){{7}}"""
    rf"""|(?:{_HEX}(?::{_HEX}){{0,6}})?::(?:(?:{_HEX}:){{0,6}}(?:{_QUAD}|{_HEX}))?)(?![\w:]|\.\d)"""
    rf"""|(?<![\d.]){_QUAD}(?!\d|\.\d)"""
    r"""|(\b(?:server at|on socket|certificate for|host name|host|hostaddr|user|role|port|call failed):? """
    r"""|\b(?:host|hostaddr|port|user|dbname)=)"""
    rf"""(?:{_QUOTED}(?: \([^)\u2026]*(?:[)\u2026]|\Z))?|(?<==)[^\s'",;)]+|\({_QUOTED}, \d+[^)]*\)"""
    r"""|(?<=port )(?:\d{3,5}|\d{1,2}(?= failed)))"""
    r"""|(?<!\S)\S+(?:\u2026|\.{3})(?=\n|\Z)"""
)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, as they are: of ten thousand rows, deep copies take seconds."""
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _field_names(kind)}


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(kind))


def without_addresses(value: Any) -> Any:
    """Return a value with the addresses masked that are in its texts, also in lists, mappings and dataclasses."""
    if type(value) is str:  # no enum
        return ADDRESS.sub(lambda match: f"{match[1] or ''}***", value)
    if isinstance(value, Mapping):
        return {name: without_addresses(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_addresses(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **without_addresses(fields_of(value)))
    return value


def described(url: URL, schema: str) -> str:
    """Return which database and schema is meant, in words."""
    return f"database {url.database!r} on {_host(url) or 'the local socket'}, schema {schema!r}"


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


def trace_of(error: BaseException) -> str:
    """Return an exception with its traceback, and what is behind it."""
    return _formatted(error, traceback.format_exception)


def error_text(error: BaseException, secrets: Collection[str] = ()) -> str:
    """Return an exception's summary, an empty line, and the end of its traceback, without secrets that they quote."""
    # Before it is cut: of a secret that is cut in two, neither part would be found.
    trace = trace_of(error)
    # The ellipsis has the end of a secret looked for, where the cut goes through one.
    trace = without(trace if len(trace) <= SEARCHED_CHARS else "…" + trace[-SEARCHED_CHARS:], secrets)
    # From the beginning of a line on: the end of an address isn't known as one.
    end = trace if len(trace) <= _TRACE_CHARS else trace[-_TRACE_CHARS:].partition("\n")[2]
    return f"{summary_of(error, secrets)}\n\n{end}"


# --- secrets that a text quotes ---------------------------------------------------------------------------------------

# What is shorter would be found everywhere in a text, and what is short is found as a word only. Of a secret that was
# cut, so much counts as a part of it.
_SHORTEST, _SHORT = 3, 6
_LONGEST_NUMBER = 40
_MOST_QUOTED = 500
_NO_SECRETS = frozenset({"true", "false", "null"})
_BETWEEN = r"(?:[^\w:]|_)"  # no colon: six digits aren't a time of day
#: Where PostgreSQL, SQLAlchemy, Python or this package left out a part of a value.
_ELLIPSIS = r"""['"]?[ \[(]?(?:\.{3}|…)[ \])]?['"]?"""
_Writer: TypeAlias = "Callable[[str], str]"
# Python, JSON and URLs, which leave some characters as they are, some clients others.
_WRITERS: tuple[_Writer, ...] = (
    storable,
    lambda text: repr(text)[1:-1],
    lambda text: repr(_raw(text))[2:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: quote(_raw(text), safe=""),
    lambda text: quote(_raw(text), safe="!#$%&'()*+,/:;=?@[]~"),
    lambda text: quote(_raw(text)),
    lambda text: quote_plus(_raw(text)),
)


def without(text: str, secrets: Iterable[str]) -> str:
    """Return a text without secrets that it quotes: in any case, as they are, grouped, or as `_WRITERS` write them.

    Where a part of a value was left out, or the text was cut, a beginning or end of a secret is taken out, too.
    """
    known = [each for each in secrets if each.casefold() not in _NO_SECRETS]
    if not known:
        return text
    folded, quoted = text.casefold(), set[str]()
    for secret in known:
        # Nothing writes letters and digits of ASCII otherwise: mostly, this tells that it isn't there.
        if max(re.findall("[A-Za-z0-9]+", secret), key=len, default="").lower() in folded:
            forms = _written(secret)
            forms |= {write(form) for form in forms if not form.isalnum() for write in _WRITERS}
            quoted |= {form for form in forms if len(form) >= _SHORTEST and form.casefold() in folded}
    if len(quoted) > _MOST_QUOTED:  # a pattern of so many would hold up the process
        return MASK
    spelled = [
        re.escape(each) if len(each) > _SHORT else rf"(?<!\w){re.escape(each)}(?!\w)"
        for each in sorted(quoted, key=len, reverse=True)
    ]
    spelled = [*_grouped(folded, known), *spelled]
    text = re.sub("|".join(spelled), MASK, text, flags=re.IGNORECASE) if spelled else text
    return _without_parts(text, known)


def _raw(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # JSON may hold one half of a surrogate pair


def _written(secret: str) -> set[str]:
    return {secret} if secret.isascii() and secret.isalnum() else {secret, *(write(secret) for write in _WRITERS)}


def _grouped(folded: str, secrets: Iterable[str]) -> Iterator[str]:
    """Yield patterns of the numbers of cards, accounts and phones that a text has, grouped as people write them."""
    squeezed = re.sub(f"{_BETWEEN}+", "", folded)
    for secret in secrets:
        bare = re.sub(_BETWEEN, "", secret).casefold() if len(secret) <= _LONGEST_NUMBER else ""
        if sum(map(str.isdecimal, bare)) >= _SHORT and bare in squeezed:
            yield rf"(?<![^\W_]){f'{_BETWEEN}?'.join(map(re.escape, bare))}(?![^\W_])"


def _without_parts(text: str, secrets: Iterable[str]) -> str:
    """Return a text without the parts of secrets that stand before or after an ellipsis, or where it may be cut."""
    pieces = re.split(f"({_ELLIPSIS})", text)
    is_cut = len(text) >= _SUMMARY_CHARS
    if len(pieces) == 1 and not is_cut:
        return text
    begun, ended = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for form in (form.lower() for secret in secrets for form in _written(secret)):
        begun[form[:_SHORT]].append(form)
        ended[form[: -_SHORT - 1 : -1]].append(form[::-1])
    for number in range(0, len(pieces), 2):
        if number < len(pieces) - 1 or is_cut:
            pieces[number] = _without_end(pieces[number], begun)
        if number:
            pieces[number] = _without_end(pieces[number][::-1], ended)[::-1]
    return "".join(pieces)


def _without_end(piece: str, begun: Mapping[str, list[str]]) -> str:
    lower = piece.lower() if len(piece.lower()) == len(piece) else piece
    longest = max((len(form) for forms in begun.values() for form in forms), default=0)
    for at in range(max(len(piece) - longest, 0), len(piece) - _SHORT + 1):
        if forms := begun.get(lower[at : at + _SHORT]):
            rest = lower[at:]
            if any(form.startswith(rest) for form in forms):
                return piece[:at] + MASK
    return piece


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
    code, what = _innermost(_own(error, "__traceback__")), class_name(error)
    where = f" in {Path(code.co_filename).name}:{code.co_qualname}" if code else ""
    with suppress(BaseException):
        # SQLAlchemy's errors are few, and say less than the driver's inside them.
        original = getattr(error, "orig", None) or error
        constraint = getattr(getattr(original, "diag", None), "constraint_name", None)
        what = class_name(original) + (f" of {constraint}" if constraint else "")
    return storable(f"{what}{where}")[:_KIND_CHARS]


def kind_of_text(text: str) -> str:
    """Return what texts with one cause have in common: the first line, without numbers, ids, addresses, quotes."""
    first = cut(text.lstrip().partition("\n")[0], _SUMMARY_CHARS)
    # Before that: without its digits an address isn't one any more that could be masked.
    return _VARIABLE.sub("…", without_addresses(first))[:_KIND_CHARS]


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


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under its name when it is whole and on the disk, and never otherwise."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


#: Between a topic and the number of its source, in a feed. No topic has it in its name.
OF_SOURCE = "@"


def feed_of(topic: str, number: int) -> str:
    """Return the feed of a topic from the source of a number (`outbox.database.identity`)."""
    return f"{topic}{OF_SOURCE}{number}" if number else topic


def feed_among(numbers: Collection[tuple[int, UUID]], topic: str, source_id: UUID) -> str:
    """Return the feed of a topic from a source, of those that a consumer has numbered; from another one, the next."""
    return feed_of(topic, next((number for number, each in numbers if each == source_id), len(numbers)))


def topic_of(feed: str) -> str:
    """Return the topic of a feed."""
    return feed.partition(OF_SOURCE)[0]


class AtLeast(int):
    """A count that stopped at its limit; a sentence says so."""

    __slots__ = ()

    def __format__(self, format_spec: str) -> str:
        return f"at least {int(self):{format_spec}}"


def at_most(value: Any, limit: int) -> Any:
    """Return a number; as `AtLeast` where it is a count that has reached its limit."""
    return AtLeast(value) if isinstance(value, int) and value >= limit else value
