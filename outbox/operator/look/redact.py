"""How bodies and headers are shown: masked, unless a person with the right to it has them revealed.

Only a value whose place has a name can be judged by that name. So in the masked mode a JSON object or array is shown,
with the values masked that stand under a telling name at any depth; everything else (plain text, forms, XML, a JSON
text or number alone) is hidden, since no name says what it holds. What isn't text is never shown as text; its bytes
can be had as they are.

JSON as it is written: its tokens, never its numbers, which would be rounded; and what is found by a path in it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from outbox.errors import InvalidSettings
from outbox.message.content import is_json
from outbox.operator.model import Body

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
    return _JSON_TEXT_WORDS.get(found, found) == value if isinstance(found, str | bool | None) else False


_NONE = object()
_JSON_TEXT_WORDS: dict[object, str] = {True: "true", False: "false", None: "null"}


def _read(text: str | bytes) -> Any:
    """Return a JSON document, each number as the text it is written with; `_NONE` if it can't be read."""
    try:
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return _NONE


Display = Literal["hidden", "masked", "full"]

#: What is put where a value was masked.
MASK = "***"
#: How much of a body is shown, in bytes.
LIMIT = 64 * 1024

#: Names of values that are masked: matched against the words of a name, joined by ``_`` and in lower case. So
#: ``cardNumber``, ``card-number`` and ``CARD_NUMBER`` all have the word ``card``, which ``discard`` has not.
KEYS = (
    r"\w*passw(or)?ds?|\w*passphrase|pwd|\w*secrets?|\w*tokens?|authorization|credentials?|api_?keys?|\w*cookies?"
    r"|cards?|credit_?cards?|cvc|cvv|iban|ssn|\w*e_?mails?|(tele|mobile_?|cell_?)?phones?"
)

_LONGEST_NAME = 256

_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\W_]+")
_TEXT = re.compile(r"text/.+|application/(.+\+)?(json|xml)|application/x-www-form-urlencoded")


class Redactor:
    """Shows bodies and headers: ``hidden`` (nothing of them), ``masked`` or ``full``.

    ``keys`` is a regular expression for the names of values that are masked (see `KEYS`), ``limit`` how many bytes of a
    text are shown. A redactor never changes a number or a text that it shows: ``12.30`` stays ``12.30``.

    Raises:
        InvalidSettings: another way of display, a ``keys`` that is no regular expression, a limit below 1.
    """

    def __init__(self, display: Display = "masked", keys: str | re.Pattern[str] = KEYS, limit: int = LIMIT) -> None:
        if display not in get_args(Display):
            raise InvalidSettings(f"display {display!r} must be one of: {', '.join(get_args(Display))}")
        if limit < 1:
            raise InvalidSettings(f"limit {limit} must be at least 1 byte")
        pattern = keys.pattern if isinstance(keys, re.Pattern) else keys
        try:
            self._keys = re.compile(rf"(?:^|_)(?:{pattern})(?:_|$)", re.IGNORECASE)
        except re.error as error:
            raise InvalidSettings(f"keys {pattern!r} is no regular expression: {error}") from None
        self.display = display
        self.limit = limit

    def masks(self, name: str) -> bool:
        """Tell whether values of this name are masked; those of a name that is too long to be one always are."""
        if len(name) > _LONGEST_NAME:
            return True
        words = _WORDS.sub("_", unicodedata.normalize("NFKC", name))
        return self._keys.search(words.casefold()) is not None

    def body(self, content_type: str, raw: bytes, *, reveal: bool = False) -> Body:
        """Return a body as it may be shown, JSON in lines of its own; with ``reveal`` nothing of it is masked."""
        full = reveal or self.display == "full"
        text: str | None = None
        masked: list[str] = []
        if full or self.display == "masked":
            known = _text(content_type, raw)
            if known is not None and is_json(content_type) and (full or is_container(known)) and is_json_text(known):
                text, masked = self._written(known, full=full, limit=self.limit)
            elif full:
                text = known
        shown = None if text is None else text.encode()[: self.limit].decode(errors="ignore")
        return Body(
            content_type=content_type,
            size=len(raw),
            text=shown,
            masked=tuple(masked),
            truncated=shown != text,
            revealed=reveal,
        )

    def headers(self, headers: Mapping[str, str] | None, *, reveal: bool = False) -> dict[str, str]:
        """Return headers as they may be shown."""
        shown = dict(headers or {})
        if reveal or self.display == "full":
            return shown
        if self.display == "hidden":
            return dict.fromkeys(shown, MASK)
        return {name: MASK if self.masks(name) or self._holds(value) else value for name, value in shown.items()}

    def document(self, value: Any, *, reveal: bool = False) -> Any:
        """Return a JSON document, read already, as it may be shown."""
        if reveal or self.display == "full" or value is None:
            return value
        if self.display == "hidden":
            return MASK
        if isinstance(value, dict):
            return {name: MASK if self.masks(name) else self.document(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.document(inner) for inner in value]
        return MASK if isinstance(value, str) and self._holds(value) else value

    def _holds(self, text: str) -> bool:
        """Tell whether a text is JSON itself, with a value in it that would be masked."""
        return (
            is_container(text) and is_json_text(text) and bool(self._written(text, full=False, limit=len(text) * 4)[1])
        )

    def _written(self, text: str, *, full: bool, limit: int) -> tuple[str, list[str]]:
        """Return JSON written anew, token by token, to a little beyond the limit; and the paths of what is masked."""
        writer = JsonWriter()
        masked: list[str] = []
        skipping = 0
        for match in TOKEN.finditer(text):
            token = match[0]
            if skipping:
                skipping += (token in OPENING) - (token in CLOSING)
            elif not full and writer.expects_value(token) and self._masked(writer.name, token):
                masked.append(writer.path)
                writer.write(f'"{MASK}"')
                skipping = int(token in OPENING)
            elif writer.write(token) > limit:
                break
        return "".join(writer.pieces), masked

    def _masked(self, name: str | None, token: str) -> bool:
        return (name is not None and self.masks(name)) or (token[0] == '"' and self._holds(json.loads(token)))


def _text(content_type: str, raw: bytes) -> str | None:
    """Return bytes as a text if the type is one of texts; all of ours are UTF-8."""
    if not _TEXT.fullmatch(content_type.partition(";")[0].strip().lower()):
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
