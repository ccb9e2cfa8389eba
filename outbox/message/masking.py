"""Names that tell of secrets and of personal data, and what must not be shown for them, wherever it stands.

Only a value whose place has a name can be judged by that name. A value of a document without any, such as a text alone
or an element of a list that is the whole, is taken for a secret.

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
from typing import Any

from outbox.errors import InvalidMessage
from outbox.message.content import Codecs, is_json

#: What is put where a value was masked.
MASK = "***"

#: Of a word, its beginning; and what a number is called.
_ANY, _NO = r"[^\W_]*", "_?(numbers?|nums?|nos?|nrs?)"
#: Names of values that are masked: matched against the words of a name, joined by ``_`` and in lower case. So
#: ``cardNumber``, ``card-number`` and ``CARD_NUMBERS`` all have the word ``card``, which ``discard`` has not. A number
#: at a word's end, as in ``pin2``, is no part of it.
KEYS = "|".join(
    (
        # Passwords, keys and other means of access.
        rf"{_ANY}pass_?wor[dt]s?|{_ANY}passwds?|{_ANY}pass_?phrases?|pass_?codes?|(db|user|admin|login|smtp)_?pass|pwds?",
        rf"{_ANY}secrets?|{_ANY}tokens?|jwts?|bearers?|authori[sz]ations?|auth|{_ANY}credentials?|creds?|{_ANY}cookies?",
        r"(api|access|account|auth|client|deploy|encryption|hmac|license|master|private|session|shared|signature|"
        r"signing|ssh|storage|symmetric|webhook)_?keys?",
        rf"{_ANY}signatures?|sigs?|hmacs?|[mt]?pins?|pin({_NO}|_?codes?|_?blocks?)|t?otps?|otp_?codes?|one_?time_?pass",
        r"(2?fa|mfa|auth|two_?factor|one_?time|verification|confirmation|recovery|backup|access|sms|security)_?codes?",
        # Cards and accounts.
        rf"((credit|debit|bank|payment)_?)?cards?({_NO}|_?holders?(_?names?)?)?|ccn|cc{_NO}|pans?",
        r"(cvv|cvc|cvn|csc)(_?(codes?|numbers?|values?))?|ibans?|bics?|swift_?(bic|codes?)|sort_?codes?|bsb",
        rf"(bank_?)?(accounts?|acct|acc){_NO}|bank_?accounts?|(routing|aba){_NO}",
        # Persons.
        rf"{_ANY}e_?mails?|mails?|{_ANY}birth_?(days?|dates?|places?|years?)|births?|date_?of_?birth|dobs?",
        rf"((tele|mobile|cell|home|work|user|customer|contact)_?)?phones?({_NO})?|(mobile|cell){_NO}|(tel|fax)({_NO})?",
        rf"msisdns?|ssns?|social_?security({_NO})?|national_?ids?|national_?insurance({_NO})?|nino|aadhaar",
        rf"passports?({_NO})?|tax_?(payer_?)?ids?|tax{_NO}|(?<!.)tins?(?!.)|driv(ers?|ing)_?licen[cs]es?",
    )
)

_LONGEST_NAME = 256
# What is shorter would be found everywhere in a text, and what is short is found as a word only.
_SHORTEST, _SHORT = 3, 6
# Not within the plural of an acronym, as in userSSNs.
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z](?!s(?:[^a-z]|$))[a-z])|[\W_]+")
_DIGITS = re.compile(r"(?<![\d_])\d+(?=_|$)")
_ANY_NAME = r'"(?:[^"\\]|\\.)*"|[^."]*'
_NAME, _PATH = re.compile(rf"(?:^|\.)({_ANY_NAME})"), re.compile(rf"(?:{_ANY_NAME})(?:\.(?:{_ANY_NAME}))*")
#: The fields of views that may quote a message.
_TEXTS = frozenset({"detail", "error", "last_error", "next", "reason", "result"})
_OPENING = ("{", "[")

#: What `read_json` returns for what is no JSON.
NO_JSON = object()


class SecretNames:
    """Tells names of secrets and of personal data from others; ``keys`` is a regular expression as `KEYS` is one."""

    def __init__(self, keys: str = KEYS) -> None:
        self._keys = rf"(?:^|_)(?:{keys})(?:_|$)"

    def masks(self, name: str) -> bool:
        """Tell whether values of this name are masked; those of a name that is too long to be one always are."""
        return len(name) > _LONGEST_NAME or _has_word(self._keys, name)

    def secrets_in(self, document: Any, *, named: bool = False) -> Iterator[str]:
        """Yield the values, as texts, of a document of `read_json` that are masked; ``named``: its place has a name."""
        for path, value in leaves(document):
            names = [name for name in path if isinstance(name, str)]
            if not (names or named) or any(map(self.masks, names)):
                yield value
            elif (inner := read_container(value)) is not NO_JSON:
                yield from self.secrets_in(inner, named=True)


def secrets_of(
    names: SecretNames, headers: Mapping[str, str], content_type: str, raw: bytes, codecs: Codecs
) -> Iterator[str]:
    """Yield what is masked in the headers and the body of a message; the whole body, if it can't be read by names."""
    try:
        known = codecs.as_json(raw, content_type)
    except InvalidMessage:  # its bytes are one secret then
        known = None
    document = read_json(known or raw) if known or is_json(content_type) else NO_JSON
    return names.secrets_in([dict(headers), raw.decode(errors="replace") if document is NO_JSON else document])


#: The names by `KEYS`.
NAMES: SecretNames = SecretNames()


@lru_cache(10_000)
def _has_word(keys: str, name: str) -> bool:
    if not name.isascii():
        # Characters without a form of their own would part a word that reads as one.
        name = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf")
    words = _WORDS.sub("_", name).casefold()
    bare = _DIGITS.sub("", words)
    # Compiled, and kept, at the first use: not when the package is imported.
    return any(re.search(keys, each, re.IGNORECASE) for each in dict.fromkeys((words, bare)))


def without(text: str, secrets: Iterable[str]) -> str:
    """Return a text without secrets that it quotes, as they are or as Python or JSON write them."""
    forms = (form for each in secrets for form in (each, repr(each)[1:-1], json.dumps(each)[1:-1]))
    quoted = {form for form in forms if len(form) >= _SHORTEST and form in text} - {"true", "false", "null"}
    spelled = [
        re.escape(each) if len(each) > _SHORT else rf"(?<!\w){re.escape(each)}(?!\w)"
        for each in sorted(quoted, key=len, reverse=True)
    ]
    return re.sub("|".join(spelled), MASK, text) if spelled else text


def cleaned(value: Any, secrets: Collection[str], *, is_text: bool = False) -> Any:
    """Return a view, or a JSON document in one (``is_text``), without the secrets that its texts quote."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **cleaned(inner, secrets))
    if isinstance(value, dict):
        return {name: cleaned(each, secrets, is_text=is_text or name in _TEXTS) for name, each in value.items()}
    if isinstance(value, list):
        return [cleaned(each, secrets, is_text=is_text) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if is_text and str(value) in secrets else value
    return without(value, secrets) if is_text and isinstance(value, str) else value


def read_json(text: str | bytes) -> Any:
    """Return a JSON document, each number as the text it is written with; `NO_JSON` if it can't be read."""
    try:
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return NO_JSON


def read_container(text: str) -> Any:
    """Return the JSON object or array that a text is; `NO_JSON` if it is none."""
    return read_json(text) if text.lstrip()[:1] in _OPENING else NO_JSON


def leaves(document: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the place and the value, as a text, of all that is no container in a document, and of empty containers."""
    found: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while found:
        path, value = found.pop()
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        children = [((*path, name), child) for name, child in inner]
        found += reversed(children)
        if not children:
            yield path, json.dumps(value) if not isinstance(value, str) else value


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
