"""Filters of consumers in SQL92, as RocketMQ has them: from a text to a function of a message's properties.

A property is a text. Compared with a number it is one, and with TRUE or FALSE it is TRUE if it says so, else FALSE.
What a message doesn't have is NULL, a comparison with it is unknown, and what is TRUE in the end matches. As there:

* ``CONTAINS``, ``STARTSWITH``, ``ENDSWITH`` and their NOT forms are FALSE for a property that isn't there;
* two properties are equal if neither is there, and not equal if only the right one is missing;
* ``IN`` takes texts; ``>``, ``>=``, ``<``, ``<=`` and ``BETWEEN`` take numbers.

Otherwise than there, so that a filter passes no message over in silence: a property that isn't a number makes its
comparison unknown, not the whole filter FALSE; 2.5 may be compared with 2; ``!=`` is ``<>``. What never means there
what it seems to is refused: a property alone, NOT before a comparison without parentheses, a search for no text.

The caller puts a message's tag and keys among its properties, as TAGS and KEYS.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn

from outbox.errors import BadExpression

#: The most characters of a filter, and how deep its parentheses and NOTs may be.
MOST_CHARACTERS, MOST_DEPTH = 16_384, 64

#: What a part of a filter is for a message with these properties; of a condition: True, False or None.
_Value = Callable[[Mapping[str, str]], Any]
_TOKEN = re.compile(
    r"""(?P<blank>\s+|--[^\n]*|/\*.*?\*/)
    |(?P<number>(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d{1,6})?[lL]?(?![\w$]))
    |(?P<text>'(?:[^']|'')*')
    |(?P<word>[A-Za-z_$][A-Za-z0-9_$]*)
    |(?P<sign><>|!=|<=|>=|[-+=<>(),])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
# What has matched is never given back: over long digits that would take minutes, while no other client is served.
_NUMBER = re.compile(r" *[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d{1,6})? *", re.ASCII)
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_SEARCHES: Mapping[str, Callable[[str, str], bool]]
_SEARCHES = {"CONTAINS": operator.contains, "STARTSWITH": str.startswith, "ENDSWITH": str.endswith}
_CONSTANTS = {"TRUE": True, "FALSE": False, "NULL": None}
_WORDS = {"AND", "OR", "NOT", "IS", "BETWEEN", "IN", *_SEARCHES, *_CONSTANTS}


def compile_expression(text: str) -> Callable[[Mapping[str, str]], bool]:
    """Return a function that tells from a message's properties whether the filter matches.

    Raises:
        BadExpression: the text is no such filter, or longer or deeper than allowed.
    """
    if len(text) > MOST_CHARACTERS:
        raise BadExpression(text, MOST_CHARACTERS + 1, f"it may have {MOST_CHARACTERS:,} characters")
    value = _Parser(text).whole()
    return lambda properties: value(properties) is True


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


class _Part(NamedTuple):
    """What stands on a side of a comparison: a property, a text, a number, NULL, or a condition."""

    kind: str
    value: _Value
    token: _Token


class _Parser:
    """A recursive descent: what binds least comes first. Every method leaves the token after what it has read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._at = self._depth = 0

    def _split(self) -> list[_Token]:
        tokens, at = [], 0
        while at < len(self._text):
            if (found := _TOKEN.match(self._text, at)) is None:
                self._fail("no name, number, 'text' or sign begins so", _Token("", "", at + 1))
            kind, text = str(found.lastgroup), found[0]
            if kind == "word" and text.upper() in _WORDS:
                kind, text = "sign", text.upper()
            if kind != "blank":
                tokens.append(_Token(kind, text, at + 1))
            at = found.end()
        return [*tokens, _Token("end", "", at + 1)]

    def _fail(self, mend: str, token: _Token | None = None) -> NoReturn:
        raise BadExpression(self._text, (token or self._tokens[self._at]).position, mend)

    def _take(self, *signs: str) -> str | None:
        """Return the next token's text and go on if it is one of the signs and words."""
        token = self._tokens[self._at]
        if token.kind != "sign" or token.text not in signs:
            return None
        self._at += 1
        return token.text

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            self._fail(f"write {sign} here")

    def whole(self) -> _Value:
        value = self._condition(self._either())
        if self._tokens[self._at].kind != "end":
            self._fail("write AND or OR between two conditions, and parentheses around one that is compared")
        return value

    def _condition(self, part: _Part, example: str = "NAME = TRUE") -> _Value:
        if part.kind != "condition":
            self._fail(f"write a condition, such as {example}: this alone is none", part.token)
        return part.value

    def _either(self) -> _Part:
        return self._several("OR", lambda: self._several("AND", self._comparison, decides=False), decides=True)

    def _several(self, word: str, part: Callable[[], _Part], *, decides: bool) -> _Part:
        parts = [part()]
        while self._take(word):
            parts.append(part())
        if len(parts) == 1:
            return parts[0]
        return _Part("condition", _joined([self._condition(each) for each in parts], decides), parts[0].token)

    def _deeper(self, part: Callable[[], _Part], token: _Token) -> _Part:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            self._fail(f"parentheses and NOTs may be {MOST_DEPTH} deep", token)
        found = part()
        self._depth -= 1
        return found

    def _comparison(self) -> _Part:
        left, denied = self._side(), bool(self._take("NOT"))
        if denied and self._tokens[self._at].text not in {"BETWEEN", "IN", *_SEARCHES}:
            self._fail("after NOT comes BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH")
        match sign := self._take("=", "<>", "!=", *_ORDERS, "IS", "BETWEEN", "IN", *_SEARCHES):
            case None:
                return left
            case "=" | "<>" | "!=":
                value, denied = self._equal(left, self._side()), sign != "="
            case "IS":
                value, denied = (lambda properties: left.value(properties) is None), bool(self._take("NOT"))
                self._need("NULL")
            case "BETWEEN":
                value = self._between(left)
            case "IN":
                value = self._among(left)
            case _ if sign in _ORDERS:
                value = self._ordered(left, sign, self._side())
            case _:
                value, denied = self._search(left, _SEARCHES[sign], denied), False
        return _Part("condition", _denied(value) if denied else value, left.token)

    def _equal(self, left: _Part, right: _Part) -> _Value:
        kinds = {left.kind, right.kind}
        if "NULL" in kinds:
            self._fail("compare with NULL by IS NULL or IS NOT NULL", left.token)
        if "condition" in kinds and not kinds <= {"condition", "property"}:
            self._fail("compare a property or a condition with TRUE or FALSE, no number or text", left.token)
        convert: Callable[[Any], Any] = _truth if "condition" in kinds else _number if "number" in kinds else str

        def value(properties: Mapping[str, str]) -> bool | None:
            one, other = left.value(properties), right.value(properties)
            if one is None or other is None:  # as there, see the head
                return None if other is not None else one is None
            return _compared(operator.eq, convert(one), convert(other))

        return value

    def _ordered(self, left: _Part, sign: str, right: _Part) -> _Value:
        for each in (left, right):
            if each.kind not in {"property", "number"}:
                self._fail(f"{sign} compares numbers and properties; texts are compared by = and <>", each.token)

        return lambda properties: _compared(
            _ORDERS[sign], _number(left.value(properties)), _number(right.value(properties))
        )

    def _between(self, left: _Part) -> _Value:
        low = self._side()
        self._need("AND")
        high = self._side()
        if low.kind == high.kind == "number" and low.value({}) > high.value({}):
            self._fail("BETWEEN takes the lower number first", low.token)
        return _joined([self._ordered(left, ">=", low), self._ordered(left, "<=", high)], decides=False)

    def _among(self, left: _Part) -> _Value:
        self._need("(")
        texts = {self._quoted(left)}
        while self._take(","):
            texts.add(self._quoted(left))
        self._need(")")
        return lambda properties: None if (found := left.value(properties)) is None else found in texts

    def _search(self, left: _Part, search: Callable[[str, str], bool], denied: bool) -> _Value:
        sought = self._quoted(left) or self._fail("search for a text of one character at least")
        return lambda properties: (found := left.value(properties)) is not None and search(found, sought) is not denied

    def _quoted(self, left: _Part) -> str:
        """Return the text that follows, which a property's is compared with."""
        if left.kind != "property":
            self._fail("write a property's name on the left", left.token)
        if self._tokens[self._at].kind != "text":
            self._fail("write a text in quotes here")
        self._at += 1
        return _unquoted(self._tokens[self._at - 1].text)

    def _side(self) -> _Part:
        token = self._tokens[self._at]
        if self._take("("):
            inner = self._deeper(self._either, token)
            self._need(")")
            return inner
        if self._take("NOT"):
            return _Part("condition", _denied(self._condition(self._deeper(self._side, token), "NOT (…)")), token)
        if word := self._take(*_CONSTANTS):
            return _Part("NULL" if word == "NULL" else "condition", lambda _: _CONSTANTS[word], token)
        sign, (kind, text, _) = self._take("-", "+"), self._tokens[self._at]
        if kind not in ({"number"} if sign else {"number", "word", "text"}):
            self._fail(f"after {sign} comes a number" if sign else "write a property's name, a number or a 'text' here")
        self._at += 1
        if kind == "word":
            return _Part("property", lambda properties: properties.get(text), token)
        constant = _unquoted(text) if kind == "text" else Decimal((sign or "") + text.rstrip("lL"))
        return _Part(kind, lambda _: constant, token)


def _joined(values: list[_Value], decides: bool) -> _Value:
    """Return conditions joined by OR, of which a TRUE one decides, or by AND, of which a FALSE one does."""

    def value(properties: Mapping[str, str]) -> bool | None:
        found = {each(properties) for each in values}
        return decides if decides in found else None if None in found else not decides

    return value


def _compared(compare: Callable[[Any, Any], bool], one: object, other: object) -> bool | None:
    return None if one is None or other is None else compare(one, other)


def _denied(value: _Value) -> _Value:
    return lambda properties: None if (found := value(properties)) is None else not found


def _unquoted(text: str) -> str:
    return text[1:-1].replace("''", "'")


def _truth(value: bool | str) -> bool:
    return value.lower() == "true" if isinstance(value, str) else value


def _number(value: str | Decimal | None) -> Decimal | None:
    """Return the number that a text says, or None for another text."""
    if isinstance(value, str):
        return Decimal(value) if _NUMBER.fullmatch(value) else None
    return value
