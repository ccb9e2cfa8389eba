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
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from outbox.errors import InvalidMessage, InvalidSettings
from outbox.message.content import Codecs, is_json
from outbox.operator.model import Body

_OPENING = frozenset("{[")
_CLOSING = frozenset("}]")
_SEPARATORS = {":": ": ", ",": ","}
#: The tokens of a valid JSON text; what lies between them is white space.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\]:,]|[^\s"{}\[\]:,]++')
_INDENT = "  "
_BEFORE_FIRST = -1


def _is_container(text: str) -> bool:
    """Tell whether a text looks like a JSON object or array."""
    return text.lstrip()[:1] in _OPENING


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
#: How many changes of a body are told.
CHANGES = 50
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

    def hides_in_body(self, path: str, value: str) -> bool:
        """Tell whether a body is shown without the value at this path: who finds it by a filter has read it."""
        return self._hides(path.split("."), value)

    def hides_header(self, name: str, value: str) -> bool:
        """Tell whether a header of this value is shown without it: who finds it by a filter has read it."""
        return self._hides([name], value)

    def _hides(self, names: list[str], value: str) -> bool:
        if self.display != "masked":
            return self.display == "hidden"
        return any(map(self.masks, names)) or self._holds(value)

    def body(self, content_type: str, raw: bytes, *, reveal: bool = False, codecs: Codecs | None = None) -> Body:
        """Return a body as it may be shown, JSON in lines of its own; with ``reveal`` nothing of it is masked.

        What one of ``codecs`` reads is shown as JSON.
        """
        full = reveal or self.display == "full"
        text: str | None = None
        masked: list[str] = []
        if full or self.display == "masked":
            decoded = _decoded(content_type, raw, codecs)
            known = _text(content_type, raw) if decoded is None else decoded
            written = decoded is not None or is_json(content_type)
            if known and written and (full or _is_container(known)) and _read(known) is not _NONE:
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

    def changes(self, before: bytes, after: bytes) -> list[dict[str, str | None]] | None:
        """Return what differs between two JSON documents, each value as it may be shown; None if one isn't JSON.

        Each change has the ``path``, and the values ``from`` and ``to``, None where there is none. Of many changes the
        first `CHANGES` are returned.
        """
        documents = [_read(raw) for raw in (before, after)]
        if any(document is _NONE for document in documents):
            return None
        old, new = (dict(_leaves(document)) for document in documents)

        def shown(path: str, value: str | None) -> str | None:
            return MASK if value is not None and self.hides_in_body(path, value) else value

        different = [path for path in {**old, **new} if old.get(path) != new.get(path)]
        return [
            {"path": path, "from": shown(path, old.get(path)), "to": shown(path, new.get(path))}
            for path in different[:CHANGES]
        ]

    def _holds(self, text: str) -> bool:
        """Tell whether a text is JSON itself, with a value in it that would be masked."""
        is_document = _is_container(text) and _read(text) is not _NONE
        return is_document and bool(self._written(text, full=False, limit=len(text) * 4)[1])

    def _written(self, text: str, *, full: bool, limit: int) -> tuple[str, list[str]]:
        """Return JSON, one member a line, to a little beyond the limit; and the paths of what is masked in it."""
        pieces: list[str] = []
        masked: list[str] = []
        # The latest member of each object and array around the token: its name (None before it) or number.
        path: list[str | int | None] = []
        size = skipped = 0
        for match in _TOKEN.finditer(text):
            piece, line, inside = match[0], "\n" + _INDENT * len(path), path[-1] if path else ""
            if skipped:
                skipped += (piece in _OPENING) - (piece in _CLOSING)
                continue
            if piece in _CLOSING:
                is_empty = path.pop() in {None, _BEFORE_FIRST}
                piece = piece if is_empty else "\n" + _INDENT * len(path) + piece
            elif piece in _SEPARATORS:
                if piece == "," and isinstance(inside, str):
                    path[-1] = None
                piece = _SEPARATORS[piece]
            elif inside is None:
                path[-1] = json.loads(piece)
                piece = line + piece
            else:
                before = ""
                if isinstance(inside, int):
                    path[-1], before = inside + 1, line
                if not full and self._masked(inside if path and isinstance(inside, str) else None, piece):
                    masked.append(".".join(map(str, path)))
                    skipped, piece = int(piece in _OPENING), f'"{MASK}"'
                elif piece in _OPENING:
                    path.append(None if piece == "{" else _BEFORE_FIRST)
                piece = before + piece
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                break
        return "".join(pieces), masked

    def _masked(self, name: str | None, token: str) -> bool:
        return (name is not None and self.masks(name)) or (token[0] == '"' and self._holds(json.loads(token)))


def _leaves(document: Any) -> Iterator[tuple[str, str]]:
    """Yield the paths and the values, as texts, of all that is no container in a document, and of empty containers."""
    found = [("", document)]
    while found:
        path, value = found.pop()
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        before = f"{path}." if path else ""
        children = [(f"{before}{name}", child) for name, child in inner]
        found += reversed(children)
        if not children:
            yield path, json.dumps(value) if not isinstance(value, str) else value


def _decoded(content_type: str, raw: bytes, codecs: Codecs | None) -> str | None:
    """Return what a codec reads, as JSON; None where none does, or can."""
    try:
        decoded = codecs.as_json(raw, content_type) if codecs else None
    except InvalidMessage:  # the bytes are shown then
        return None
    return None if decoded is None else decoded.decode()


def _text(content_type: str, raw: bytes) -> str | None:
    """Return bytes as a text if the type is one of texts; all of ours are UTF-8."""
    if not _TEXT.fullmatch(content_type.partition(";")[0].strip().lower()):
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
