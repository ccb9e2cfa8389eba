"""Names that tell of secrets and of personal data, and what is shown of bodies and headers, wherever it stands.

They are shown masked, unless a person with the right to it has them revealed. Only a value whose place has a name can
be judged by that name: so a JSON object or array is shown, with the values masked that stand under a telling name at
any depth. A value without any name is taken for a secret: a text alone, an element of a list that is the whole, plain
text, forms, XML. What isn't text is never shown as text; its bytes can be had as they are.

JSON is shown as it is written: its tokens, never its numbers, which would be rounded.

A path names a place in a JSON document: ``order.lines.0.id``. A name that has a dot, a quote, a bracket, an equals sign
or what can't be printed in it, or is empty, is written as JSON writes it: ``order."api.key"``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from urllib.parse import unquote_plus

from outbox.errors import InvalidMessage, InvalidSettings
from outbox.message.content import SENDER_HEADER, Codecs, is_json
from outbox.text import MASK, without

#: Of a word, its beginning; and what a number is called.
_ANY, _NO = r"[^\W_]*", "_?(numbers?|nums?|nos?|nrs?)"
#: Names of values that are masked: matched against the words of a name, joined by ``_`` and in lower case. So
#: ``cardNumber``, ``card-number`` and ``CARD_NUMBERS`` all have the word ``card``, which ``discard`` has not. A number
#: at a word's end, as in ``pin2``, is no part of it.
KEYS = "|".join(
    (
        # Passwords, keys and other means of access.
        rf"{_ANY}pass_?wor[dt]s?|{_ANY}passwds?|{_ANY}pass_?phrases?|pass_?codes?|(db|user|admin|login|smtp)_?pass|pass(?!.)|pwds?|pw",
        rf"{_ANY}secrets?|{_ANY}tokens?|jwts?|bearers?|authori[sz]ations?|auth|{_ANY}credentials?|creds?|{_ANY}cookies?",
        r"(aes|api|access|account|auth|client|deploy|encryption|hmac|license|master|private|session|shared|signature|"
        r"secret|signing|ssh|storage|subscription|symmetric|webhook)_?keys?|connection_?strings?|dsns?",
        rf"{_ANY}signatures?|sigs?|hmacs?|[mt]?pins?|pin({_NO}|_?codes?|_?blocks?)|t?otps?|otp_?codes?|one_?time_?pass",
        rf"[im]?tans?({_NO}|_?codes?)?",
        r"(2?fa|mfa|auth|two_?factor|one_?time|verification|confirmation|recovery|backup|access|sms|security)_?codes?",
        # Cards and accounts.
        rf"((credit|debit|bank|payment)_?)?cards?({_NO}|_?holders?(_?names?)?)?|ccn|cc{_NO}|pans?|track_?[123](_?data)?|track_?data",
        r"(cvv|cvc|cvn|csc)(_?(codes?|numbers?|values?))?|ibans?|bics?|swift(_?(bic|codes?))?|sort_?codes?|bsb",
        rf"(bank_?)?(accounts?|acct|acc){_NO}|bank_?accounts?|(routing|aba){_NO}",
        # Persons.
        rf"{_ANY}e_?mails?(_?addr(ess(es)?)?)?|mails?|{_ANY}birth_?(days?|dates?|places?|years?)|births?|date_?of_?birth|dobs?",
        rf"((tele|mobile|cell|home|work|user|customer|contact)_?)?phones?({_NO})?|(mobile|cell){_NO}|(tel|fax)({_NO})?",
        rf"msisdns?|ssns?|social_?security({_NO})?|national_?ids?|national_?insurance({_NO})?|nino|aadhaar",
        rf"passports?({_NO})?|tax_?(payer_?)?ids?|(tax|vat){_NO}|(vat|ust)_?ids?|(?<!.)tins?(?!.)|driv(ers?|ing)_?licen[cs]es?",
    )
)

_LONGEST_NAME = 256
# Not within the plural of an acronym, as in userSSNs.
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z](?!s(?:[^a-z]|$))[a-z])|[\W_]+")
_DIGITS = re.compile(r"(?<![\d_])\d+(?=_|$)")
# The name and the value of a pair that is an object.
_NAMING = frozenset({"name", "key", "field", "k", "property", "attribute", "parameter", "header", "label", "path"})
_DESCRIBED = re.compile(r".*val(ue)?s?|v|text|content|data|old|new|before|after|from|to|value[a-z]+")
# A form, the query of a URL, a cookie, a connection string: their names, and their values, quoted or not.
_FORM = re.compile(r"""([\w.%+$\[\]-]{1,100})=("[^"]*"|'[^']*'|[^\s&;="']+=*)""")
_BOM = "\ufeff"
_BLANK = f"{_BOM} \t\r\n"
_ANY_NAME = r'"(?:[^"\\]|\\.)*"|[^."]*'
_NAME, _PATH = re.compile(rf"(?:^|\.)({_ANY_NAME})"), re.compile(rf"(?:{_ANY_NAME})(?:\.(?:{_ANY_NAME}))*")
#: The fields of views that may quote a message.
_TEXTS = frozenset({"detail", "error", "last_error", "next", "reason", "result"})
_OPENING = frozenset("{[")
#: Texts in texts that are read.
_INNERMOST = 8
Steps: TypeAlias = tuple[str | int, ...]

#: What `read_json` returns for what is no JSON.
NO_JSON = object()


class SecretNames:
    """Tells names of secrets and of personal data from others; ``keys`` is a regular expression as `KEYS` is one."""

    def __init__(self, keys: str = KEYS) -> None:
        self._keys = unicodedata.normalize("NFC", rf"(?:^|_)(?:{keys})(?:_|$)")

    def masks(self, name: str) -> bool:
        """Tell whether values of this name are masked; those of a name that is too long to be one always are."""
        return len(name) > _LONGEST_NAME or _has_word(self._keys, name)

    def secrets_in(self, document: Any, *, named: bool = False, masked: bool = False, depth: int = 0) -> Iterator[str]:
        """Yield the values, as texts, of a document of `read_json` that are masked.

        ``named``: its place has a name; ``masked``: it is one that is masked, with all that is in it; ``depth``: in so
        many texts it lies. What lies in more than `_INNERMOST` is a secret as a whole.
        """
        described, parent, of_parent = self.described(document), None, False
        for path, value in leaves(document):
            if path[:-1] != parent:  # neighbours share it: a path may have a thousand steps
                parent, of_parent = path[:-1], self.first_masked(path[:-1], described) is not None
            is_masked = masked or of_parent or self._masks_last(path, described)
            inner = _inside(value)
            is_named = named or any(isinstance(name, str) for name in path)
            if is_masked or not is_named or (inner and depth >= _INNERMOST):
                yield value
            if inner and depth < _INNERMOST:
                yield from self.secrets_in(inner, named=True, masked=is_masked, depth=depth + 1)

    def first_masked(self, path: Steps, described: Collection[Steps] = ()) -> int | None:
        """Return at which step of a path the first value is that is masked, with all below it; None if none is."""
        return next((n for n in range(1, len(path) + 1) if self._masks_last(path[:n], described)), None)

    def _masks_last(self, path: Steps, described: Collection[Steps]) -> bool:
        is_name = bool(path) and isinstance(path[-1], str)
        return is_name and (self.masks(str(path[-1])) or is_described(path, described))

    def described(self, document: Any) -> frozenset[Steps]:
        """Return the objects of a document that have a masked name as a value: ``{"name": "card", "value": "41…"}``."""
        return frozenset(
            path[:-1]
            for path, value in leaves(document)
            if path and str(path[-1]).lower() in _NAMING and len(value) <= _LONGEST_NAME and self.masks(value)
        )


def is_described(path: Steps, described: Collection[Steps]) -> bool:
    """Tell whether this is the place of a value whose name is the value beside it, in an object of `described`."""
    return bool(described) and path[:-1] in described and bool(_DESCRIBED.fullmatch(str(path[-1]).lower()))


def secrets_of(
    names: SecretNames, headers: Mapping[str, str], content_type: str, raw: bytes, codecs: Codecs
) -> Iterator[str]:
    """Yield what is masked in the headers and the body of a message; the whole body, if it can't be read by names."""
    try:
        known = codecs.as_json(raw, content_type)
    except InvalidMessage:  # its bytes are one secret then
        known = None
    document = read_json(known or raw) if known or is_json(content_type) else NO_JSON
    texts = [raw.decode(errors="replace"), repr(raw)[2:-1]]  # as it is shown, and as errors quote bytes
    return names.secrets_in([dict(headers), *(texts if document is NO_JSON else [document])])


#: The names by `KEYS`.
NAMES: SecretNames = SecretNames()


@lru_cache(10_000)
def _has_word(keys: str, name: str) -> bool:
    # Characters without a form of their own would part a word that reads as one; so would marks, which change letters.
    spellings = [name] if name.isascii() else [_letters(name, "NFKC", {"Cf"}), _letters(name, "NFKD", {"Cf", "Mn"})]
    words = [_WORDS.sub("_", spelling).casefold() for spelling in spellings]
    # Compiled, and kept, at the first use: not when the package is imported.
    found = dict.fromkeys([*words, *(_DIGITS.sub("", each) for each in words)])
    return any(re.search(keys, each, re.IGNORECASE) for each in found)


def _letters(name: str, form: Literal["NFKC", "NFKD"], left_out: Collection[str]) -> str:
    return "".join(c for c in unicodedata.normalize(form, name) if unicodedata.category(c) not in left_out)


def cleaned(value: Any, secrets: Collection[str], *, is_text: bool = False) -> Any:
    """Return a view, or a JSON document in one (``is_text``), without the secrets that its texts quote."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **cleaned(inner, secrets))
    if isinstance(value, dict):
        return {
            without(name, secrets) if is_text and isinstance(name, str) else name: cleaned(
                each, secrets, is_text=is_text or name in _TEXTS
            )
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [cleaned(each, secrets, is_text=is_text) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if is_text and str(value) in secrets else value
    return without(value, secrets) if is_text and isinstance(value, str) else value


def read_json(text: str | bytes) -> Any:
    """Return a JSON document, each number as the text it is written with; `NO_JSON` if it can't be read."""
    try:
        text = text.lstrip(_BOM) if isinstance(text, str) else text
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return NO_JSON


def read_container(text: str) -> Any:
    """Return the JSON object or array that a text is; `NO_JSON` if it is none."""
    return read_json(text) if text.lstrip(_BLANK)[:1] in _OPENING else NO_JSON


def _inside(text: str) -> list[Any]:
    """Return the JSON that a text is, or that of its lines, and what it says as a form; nothing that has no parts."""
    found = [read_container(text)]
    if found[0] is NO_JSON and "\n" in text:
        found = [read_container(line) for line in text.splitlines()]
    if found[0] is NO_JSON and "=" in text:
        found += [{unquote_plus(name): unquote_plus(value.strip("\"'"))} for name, value in _FORM.findall(text)]
    # What is empty is its own text again.
    return [each for each in found if each is not NO_JSON and each]


def leaves(document: Any) -> Iterator[tuple[Steps, str]]:
    """Yield the place and the value, as a text, of all that is no container in a document, and of empty containers."""
    # One by one: the places of a wide list that lies deep would take far more memory than the document.
    found: list[Iterator[tuple[Steps, Any]]] = [iter([((), document)])]
    while found:
        for path, value in found[-1]:
            if value and isinstance(value, dict | list):
                found.append(_children(path, value))
                break
            yield path, value if isinstance(value, str) else json.dumps(value)
        else:
            found.pop()


def _children(path: Steps, value: dict[str, Any] | list[Any]) -> Iterator[tuple[Steps, Any]]:
    for name, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, name), child


def path_of(names: Iterable[str | int]) -> str:
    """Return the path to a place, which `names_in` reads: names, and numbers of elements."""
    return ".".join(_quoted(name) if isinstance(name, str) else str(name) for name in names)


def _quoted(name: str) -> str:
    is_plain = name and name.isprintable() and name == name.strip() and not set(name) & set('."=[]\\')
    return name if is_plain else json.dumps(name).replace("=", "\\u003d")


def names_in(path: str) -> list[str]:
    """Return the names of a path; a number may be that of an element.

    Raises:
        ValueError: it isn't a path.
    """
    if not _PATH.fullmatch(path):
        raise ValueError(f"path {path!r} must be names with dots between; a name with a dot in it is quoted")
    found = _NAME.findall(path) if path else []
    return [json.loads(name, strict=False) if name.startswith('"') else name for name in found]


# --- what is shown of bodies and headers ------------------------------------------------------------------------------

_CLOSING = frozenset("}]")
_SEPARATORS = {":": ": ", ",": ","}
#: The tokens of a valid JSON text; what lies between them is white space.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\]:,]|[^\s"{}\[\]:,]++')
_INDENT = "  "
_BEFORE_FIRST = -1


def has_at(raw: bytes, path: str, value: str, masking: SecretNames | None = None) -> bool:
    """Tell whether a JSON document has a value, written so, at a path (`outbox.message.masking`).

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

    ``text`` is None for what is no text, or hidden; ``masked`` names the paths whose values were masked; ``truncated``
    tells that there is more. ``size`` is None where something of it is masked or hidden, whose length it would tell.
    A body of over 1 MiB is opened only to be revealed.
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
                text, masked = self._written(known.lstrip(_BOM), document, full=full, most=self.limit)
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
        return any(True for _ in self.names.secrets_in(_inside(text), named=True))

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
                if not full and self._masked(path, piece, described):
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
