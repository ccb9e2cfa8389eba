"""How bodies and headers are shown: masked, unless a person with the right to it has them revealed.

Only a value whose place has a name can be judged by that name. So in the masked mode a JSON object or array is shown,
with the values masked that stand under a telling name at any depth; everything else (plain text, forms, XML, a JSON
text or number alone) is hidden, since no name says what it holds. What isn't text is never shown as text; its bytes
can be had as they are.

JSON as it is written: its tokens, never its numbers, which would be rounded; and what is found by a path in it.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from outbox.errors import InvalidMessage, InvalidSettings
from outbox.message.content import SENDER_HEADER, Codecs, is_json
from outbox.message.masking import (
    KEYS,
    MASK,
    NO_JSON,
    SecretNames,
    cleaned,
    leaves,
    names_in,
    path_of,
    read_container,
    read_json,
    secrets_of,
)
from outbox.operator.model import Body

_OPENING = frozenset("{[")
_CLOSING = frozenset("}]")
_SEPARATORS = {":": ": ", ",": ","}
#: The tokens of a valid JSON text; what lies between them is white space.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\]:,]|[^\s"{}\[\]:,]++')
_INDENT = "  "
_BEFORE_FIRST = -1


def has_at(raw: bytes, path: str, value: str) -> bool:
    """Tell whether a JSON document has a value, written so, at a path (`outbox.message.masking`).

    ``value`` is a text, or a number, ``true``, ``false`` or ``null`` as the document spells it.
    """
    found = read_json(raw)
    for name in names_in(path):
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isascii() and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return False
    return _JSON_TEXT_WORDS.get(found, found) == value if isinstance(found, str | bool | None) else False


# Tokens that are shown wherever they stand.
_SHOWN = frozenset({"{", "[", "true", "false", "null"})
_JSON_TEXT_WORDS: dict[object, str] = {True: "true", False: "false", None: "null"}

T = TypeVar("T")
Display = Literal["hidden", "masked", "full"]

#: How many changes of a body are told.
CHANGES = 50
#: How much of a body is shown, in bytes.
LIMIT = 64 * 1024

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
            SecretNames(pattern).masks("")
        except re.error as error:
            raise InvalidSettings(f"keys {pattern!r} is no regular expression: {error}") from None
        self.names: SecretNames = SecretNames(pattern if display != "hidden" else ".*")
        self.display = display
        self.limit = limit
        #: The headers that are masked however the rest is shown.
        self.withheld: frozenset[str] = frozenset()

    def without_addresses(self) -> Redactor:
        """Return a redactor that also masks at which host and process a message was sent, even where it is revealed."""
        found = copy.copy(self)
        found.withheld = frozenset({SENDER_HEADER})
        return found

    def hides_in_body(self, path: str, value: str) -> bool:
        """Tell whether a body is shown without the value at this path: who finds it by a filter has read it."""
        try:
            return self._hides([int(name) if name.isdecimal() else name for name in names_in(path)], value)
        except ValueError:  # nobody knows which place it names
            return True

    def hides_header(self, name: str, value: str) -> bool:
        """Tell whether a header of this value is shown without it: who finds it by a filter has read it."""
        return name in self.withheld or self._hides([name], value)

    def _hides(self, path: Sequence[str | int], value: str) -> bool:
        if self.display != "masked":
            return self.display == "hidden"
        names = [name for name in path if isinstance(name, str)]
        return not names or any(map(self.names.masks, names)) or self._holds(value)

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
            if known and written and (read_json if full else read_container)(known) is not NO_JSON:
                text, masked = self._written(known, full=full, most=self.limit)
            elif full:
                text = known
        shown = None if text is None else text.encode()[: self.limit].decode(errors="ignore")
        is_cut = shown != text
        # The size tells of what is masked how long it is.
        is_whole = full or not (text is None or masked or is_cut)
        return Body(content_type, len(raw) if is_whole else None, shown, tuple(masked), is_cut, reveal)

    def headers(self, headers: Mapping[str, str] | None, *, reveal: bool = False) -> dict[str, str]:
        """Return headers as they may be shown."""
        full = reveal or self.display == "full"
        return {
            name: MASK if name in self.withheld or (not full and self._hides([name], value)) else value
            for name, value in (headers or {}).items()
        }

    def document(self, value: Any, *, reveal: bool = False) -> Any:
        """Return a JSON document, read already, as it may be shown; of what is in no object only truth is."""
        if reveal or self.display == "full" or value is None:
            return value
        if self.display == "hidden":
            return MASK
        text, _ = self._written(json.dumps(value), full=False)
        return json.loads(text)

    def audited(self, result: Any, *, reveal: bool = False) -> Any:
        """Return the result of an act as it may be shown: what a function returned, and what an edit has changed."""
        if not isinstance(result, dict):
            return result
        shown = dict(result)
        if "returned" in shown:
            shown["returned"] = self.document(shown["returned"], reveal=reveal)
        if not reveal and isinstance(changes := shown.get("changes"), list):
            # They were written as another console shows bodies.
            shown["changes"] = [self._change(each["path"], each["from"], each["to"]) for each in changes]
        return shown

    def texts(
        self, view: T, headers: Mapping[str, str], content_type: str, raw: bytes, codecs: Codecs, *, reveal: bool
    ) -> T:
        """Return what is shown of a message, with errors, reasons and results without what is masked in the message."""
        secrets = {headers[name] for name in self.withheld & headers.keys()}
        if not (reveal or self.display == "full"):
            secrets.update(secrets_of(self.names, headers, content_type, raw, codecs))
        shown: T = cleaned(view, secrets) if secrets else view
        return shown

    def changes(self, before: bytes, after: bytes) -> list[dict[str, str | None]] | None:
        """Return what differs between two JSON documents, each value as it may be shown; None if one isn't JSON.

        Each change has the ``path``, and the values ``from`` and ``to``, None where there is none. Of many changes the
        first `CHANGES` are returned.
        """
        documents = [read_json(raw) for raw in (before, after)]
        if any(document is NO_JSON for document in documents):
            return None
        old, new = (dict(leaves(document)) for document in documents)
        different = [path for path in {**old, **new} if old.get(path) != new.get(path)]
        return [self._change(path_of(path), old.get(path), new.get(path)) for path in different[:CHANGES]]

    def _change(self, path: str, before: str | None, after: str | None) -> dict[str, str | None]:
        old, new = (
            MASK if value is not None and self.hides_in_body(path, value) else value for value in (before, after)
        )
        return {"path": path, "from": old, "to": new}

    def _holds(self, text: str) -> bool:
        """Tell whether a text is JSON itself, with a value in it that would be masked."""
        inner = read_container(text)
        return inner is not NO_JSON and any(True for _ in self.names.secrets_in(inner, named=True))

    def _written(self, text: str, *, full: bool, most: float = math.inf) -> tuple[str, list[str]]:
        """Return JSON, one member a line, to a little beyond ``most`` characters; and the paths of what is masked."""
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
                if not full and self._masked(path, piece):
                    masked.append(path_of(each for each in path if each is not None))
                    skipped, piece = int(piece in _OPENING), f'"{MASK}"'
                elif piece in _OPENING:
                    path.append(None if piece == "{" else _BEFORE_FIRST)
                piece = before + piece
            pieces.append(piece)
            size += len(piece)
            if size > most:
                break
        return "".join(pieces), masked

    def _masked(self, path: Sequence[str | int | None], token: str) -> bool:
        name = path[-1] if path else None
        if isinstance(name, str):
            is_masked = self.names.masks(name)
        else:
            is_masked = token not in _SHOWN and not any(isinstance(each, str) for each in path)
        return is_masked or (token[0] == '"' and self._holds(json.loads(token)))


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
