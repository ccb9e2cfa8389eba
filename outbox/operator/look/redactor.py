"""What is shown of bodies and headers, with secrets and personal data masked (`outbox.message.masking`).

A person with the right to it has them revealed. A JSON object or array is shown with the values masked that stand under
a telling name. What isn't text is never shown as text; its bytes can be had as they are.

JSON is shown as it is written: its tokens, never its numbers, which would be rounded.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from outbox.errors import InvalidMessage, InvalidSettings
from outbox.message.content import SENDER_HEADER, Codecs, is_json
from outbox.message.masking import (
    BOM,
    KEYS,
    NO_JSON,
    OPENING,
    SecretNames,
    Steps,
    cleaned,
    is_described,
    leaves,
    names_in,
    parts_of,
    path_of,
    read_container,
    read_json,
    secrets_of,
)
from outbox.text import MASK

_CLOSING = frozenset("}]")
_SEPARATORS = {":": ": ", ",": ","}
#: The tokens of a valid JSON text; what lies between them is white space.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\]:,]|[^\s"{}\[\]:,]++')
_INDENT = "  "
_BEFORE_FIRST = -1


def has_at(raw: bytes, path: str, value: str, masking: SecretNames | None = None) -> bool:
    """Tell whether a JSON document has a value, written so, at a path (`outbox.message.masking.names_in`).

    ``value`` is a text, or a number, ``true``, ``false`` or ``null`` as the document spells it. With ``masking`` a
    value doesn't count whose name is another value of the document, and is masked.
    """
    document = found = read_json(raw)
    steps: Steps = ()
    for name in names_in(path):
        if isinstance(found, dict) and name in found:
            steps, found = (*steps, name), found[name]
        elif isinstance(found, list) and name.isascii() and name.isdecimal() and int(name) < len(found):
            steps, found = (*steps, int(name)), found[int(name)]
        else:
            return False
    if masking and masking.first_masked(steps, masking.described(document)):
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


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a message as it may be shown.

    ``text`` is None for a hidden body, or a binary one; ``masked`` names the paths whose values were masked;
    ``truncated`` tells that there is more. ``size`` is None where something of it is masked or hidden, whose length it
    would tell. A body of over 1 MiB is opened only to be revealed.
    """

    content_type: str
    size: int | None
    text: str | None
    masked: tuple[str, ...] = ()
    truncated: bool = False
    revealed: bool = False


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
        #: Does it mask more than workers take out of what they write down?
        self.has_own_names: bool = display == "hidden" or (display == "masked" and pattern != KEYS)
        #: The headers that are masked however the rest is shown.
        self.withheld: frozenset[str] = frozenset()

    def without_addresses(self) -> Redactor:
        """Return a redactor that also masks at which host and process a message was sent, even where it is revealed."""
        found = copy.copy(self)
        found.withheld = frozenset({SENDER_HEADER})
        return found

    def hides_in_body(self, path: str, value: str) -> bool:
        """Tell whether a body is shown without the value at this path: a search that finds it has read it."""
        try:
            return self._hides(tuple(int(name) if name.isdecimal() else name for name in names_in(path)), value)
        except ValueError:  # which place it names can't be told
            return True

    def hides_header(self, name: str, value: str) -> bool:
        """Tell whether a header of this value is shown without it: a search that finds it has read it."""
        return name in self.withheld or self._hides((name,), value)

    def _hides(self, path: Steps, value: str) -> bool:
        if self.display != "masked":
            return self.display == "hidden"
        is_named = any(isinstance(name, str) for name in path)
        return not is_named or self.names.first_masked(path) is not None or self._holds(value)

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
            document = (read_json if full else read_container)(known) if known and written else NO_JSON
            if known and document is not NO_JSON:
                text, masked = self._written(known.lstrip(BOM), document, full=full, most=self.limit)
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
            name: MASK if name in self.withheld or (not full and self._hides((name,), value)) else value
            for name, value in (headers or {}).items()
        }

    def document(self, value: Any, *, reveal: bool = False) -> Any:
        """Return a JSON document, read already, as it may be shown; of what is in no object only truth is."""
        if reveal or self.display == "full" or value is None:
            return value
        if self.display == "hidden":
            return MASK
        text, _ = self._written(json.dumps(value), value, full=False)
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
        described = frozenset[Steps]().union(*map(self.names.described, documents))
        ends = [(path, self.names.first_masked(path, described)) for path in different[:CHANGES]]
        # What is below a masked name is a part of the value.
        return [
            self._change(path_of(path[:end]), old.get(path), new.get(path), masked=bool(end) and self.display != "full")
            for path, end in ends
        ]

    def _change(
        self, path: str, before: str | None, after: str | None, *, masked: bool = False
    ) -> dict[str, str | None]:
        old, new = (
            MASK if value is not None and (masked or self.hides_in_body(path, value)) else value
            for value in (before, after)
        )
        return {"path": path, "from": old, "to": new}

    def _holds(self, text: str) -> bool:
        """Tell whether a text is JSON itself, or a form, with a value in it that would be masked."""
        return any(True for _ in self.names.secrets_in(parts_of(text), named=True))

    def _written(self, text: str, document: Any, *, full: bool, most: float = math.inf) -> tuple[str, list[str]]:
        """Return JSON, one member a line, to a little beyond ``most`` characters; and the paths of what is masked."""
        described = frozenset[Steps]() if full else self.names.described(document)
        pieces: list[str] = []
        masked: list[str] = []
        # The latest member of each object and array around the token: its name (None before it) or number.
        path: list[str | int | None] = []
        size = skipped = 0
        for match in _TOKEN.finditer(text):
            piece, line, inside = match[0], "\n" + _INDENT * len(path), path[-1] if path else ""
            if skipped:
                skipped += (piece in OPENING) - (piece in _CLOSING)
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
                if not full and self._masked(path, piece, described):
                    masked.append(path_of(each for each in path if each is not None))
                    skipped, piece = int(piece in OPENING), f'"{MASK}"'
                elif piece in OPENING:
                    path.append(None if piece == "{" else _BEFORE_FIRST)
                piece = before + piece
            pieces.append(piece)
            size += len(piece)
            if size > most:
                break
        return "".join(pieces), masked

    def _masked(self, path: Sequence[str | int | None], token: str, described: Collection[Steps]) -> bool:
        name = path[-1] if path else None
        if isinstance(name, str):
            steps = tuple(each for each in path if each is not None) if described else ()
            is_masked = self.names.masks(name) or (bool(steps) and is_described(steps, described))
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
