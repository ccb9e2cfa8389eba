"""Names that tell of secrets and of personal data, and the values that stand under them, wherever that is.

They are masked in what is shown (`outbox.operator.look.redactor`), and taken out of errors and results. Only a value
whose place has a name can be judged by that name: so an object or array of JSON has some of its values masked, at any
depth. A value without any name is taken for a secret: a text alone, an element of a list that is the whole, plain text,
forms, XML.

A path names a place in a JSON document: ``order.lines.0.id``. A name that has a dot, a quote, a bracket, an equals sign
or what can't be printed in it, or is empty, is written as JSON writes it: ``order."api.key"``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote_plus

from outbox.errors import InvalidMessage
from outbox.message.content import Codecs, is_json
from outbox.text import MASK, fields_of, without

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
BOM = "\ufeff"
_BLANK = f"{BOM} \t\r\n"
_ANY_NAME = r'"(?:[^"\\]|\\.)*"|[^."]*'
_NAME, _PATH = re.compile(rf"(?:^|\.)({_ANY_NAME})"), re.compile(rf"(?:{_ANY_NAME})(?:\.(?:{_ANY_NAME}))*")
#: The fields of views that may quote a message.
_TEXTS = frozenset({"detail", "error", "last_error", "next", "reason", "result"})
OPENING = frozenset("{[")
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
            inner = parts_of(value)
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
        return dataclasses.replace(value, **cleaned(fields_of(value), secrets))
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
        text = text.lstrip(BOM) if isinstance(text, str) else text
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return NO_JSON


def read_container(text: str) -> Any:
    """Return the JSON object or array that a text is; `NO_JSON` if it is none."""
    return read_json(text) if text.lstrip(_BLANK)[:1] in OPENING else NO_JSON


def parts_of(text: str) -> list[Any]:
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
