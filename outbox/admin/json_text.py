"""JSON as it is written: its tokens, never its numbers, which would be rounded; and what is found by a path in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

OPENING = frozenset("{[")
CLOSING = frozenset("}]")
_PUNCTUATION = frozenset("}],:")
#: The tokens of a valid JSON text; what lies between them is white space.
TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\]:,]|[^\s"{}\[\]:,]++')
_INDENT = "  "


@dataclass(slots=True)
class _Inside:
    """An object or array that is being written: the name or number of what comes next in it."""

    is_object: bool
    name: str | None = None
    number: int = -1
    empty: bool = True


class JsonWriter:
    """Writes tokens of valid JSON, one member a line."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.size = 0
        self._inside: list[_Inside] = []

    @property
    def name(self) -> str | None:
        """The name of the value that comes next; None in an array."""
        return self._inside[-1].name if self._inside and self._inside[-1].is_object else None

    @property
    def path(self) -> str:
        """The path of the value that comes next, such as ``customer.emails.0``."""
        *outer, last = self._inside
        names = (inside.name if inside.is_object else inside.number for inside in outer)
        return ".".join(str(name) for name in (*names, last.name if last.is_object else last.number + 1))

    def expects_value(self, piece: str) -> bool:
        """Tell whether a token is a value, or begins one."""
        return piece not in _PUNCTUATION and (
            not self._inside or not self._inside[-1].is_object or self.name is not None
        )

    def write(self, piece: str) -> int:
        """Write a token and return the size of all."""
        inside = self._inside[-1] if self._inside else None
        if piece in CLOSING:
            assert inside  # noqa: S101 - it is valid JSON
            self._inside.pop()
            self._put(piece if inside.empty else f"\n{_INDENT * len(self._inside)}{piece}")
        elif piece == ":":
            self._put(": ")
        elif piece == ",":
            assert inside  # noqa: S101
            inside.name = None
            self._put(",")
        else:
            self._write_value_or_name(piece, inside)
        return self.size

    def _write_value_or_name(self, piece: str, inside: _Inside | None) -> None:
        is_name = inside is not None and inside.is_object and inside.name is None
        if inside is not None:
            if is_name or not inside.is_object:
                self._put(f"\n{_INDENT * len(self._inside)}")
                inside.empty = False
            if is_name:
                inside.name = json.loads(piece)
            else:
                inside.number += 1
        self._put(piece)
        if piece in OPENING:
            self._inside.append(_Inside(piece == "{"))

    def _put(self, text: str) -> None:
        self.pieces.append(text)
        self.size += len(text)


def is_container(text: str) -> bool:
    """Tell whether a text looks like a JSON object or array."""
    return text.lstrip()[:1] in OPENING


def is_json_text(text: str) -> bool:
    """Tell whether a text is JSON that can be read."""
    return _read(text) is not _NONE


def has_at(raw: bytes, path: str, value: str) -> bool:
    """Tell whether a JSON document has a value, written so, at a path such as ``order.lines.0.id``.

    ``value`` is a text, or a number, ``true``, ``false`` or ``null`` as the document spells it.
    """
    found = _read(raw)
    for name in path.split("."):
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isascii() and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return False
    return _WORDS.get(found, found) == value if isinstance(found, str | bool | None) else False


_NONE = object()
_WORDS: dict[object, str] = {True: "true", False: "false", None: "null"}


def _read(text: str | bytes) -> Any:
    """Return a JSON document, each number as the text it is written with; `_NONE` if it can't be read."""
    try:
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return _NONE
