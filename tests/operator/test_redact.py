"""How bodies and headers are shown: what is masked, what is hidden, what is left exactly as it was written."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from outbox.errors import InvalidSettings
from outbox.operator.look.redact import MASK, Redactor, has_at

JSON = "application/json"
MASKED = Redactor()
FULL = Redactor("full")
HIDDEN = Redactor("hidden")


def shown(document: str, redactor: Redactor = MASKED, **options: Any) -> Any:
    """Return a JSON body as it is shown, read again."""
    text = redactor.body(JSON, document.encode(), **options).text
    assert text is not None
    return json.loads(text)


TELLING = """
password Password PASSWORD user_password userPassword old-password db.password passwd pwd
secret clientSecret client_secrets token accessToken access_token refreshtoken X-Auth-Token
authorization Authorization proxy-authorization cookie Set-Cookie sessioncookie
card cardNumber credit_card CARD-NO IBAN ibanOfSender ssn SSN cvc credentials apiKey api_key API-Key
email eMail e-mail emailAddress EMAIL_ADDRESS phone phoneNumber mobilePhone telephone
"""
HARMLESS = """
id amount discard cardinality cardiology tokenizer phonebook passage secretary author scarab wildcards_allowed ssnake
order.id 名前
"""


@pytest.mark.parametrize("name", [*TELLING.split(), "\uff50\uff41\uff53\uff53word", "x" * 300])
def test_names_that_are_masked(name: str) -> None:
    """Names with a telling word in them, however they are written."""
    assert MASKED.masks(name)
    assert shown(json.dumps({name: "hidden"})) == {name: MASK}
    assert MASKED.headers({name: "hidden"}) == {name: MASK}


@pytest.mark.parametrize("name", ["", *HARMLESS.split()])
def test_names_that_are_not(name: str) -> None:
    """Words that only contain a telling one are shown."""
    assert not MASKED.masks(name)


def test_masked_at_any_depth() -> None:
    """A value of any kind is masked as a whole, wherever it stands; its path is told."""
    body = MASKED.body(
        JSON,
        b"""{"a": {"password": {"deep": [1, {"b": 2}]}, "n": 1},
        "list": [{"email": null}, {"ok": []}, [{"token": [1, 2]}]], "card": [], "last": {}}""",
    )
    assert json.loads(body.text or "") == {
        "a": {"password": MASK, "n": 1},
        "list": [{"email": MASK}, {"ok": []}, [{"token": MASK}]],
        "card": MASK,
        "last": {},
    }
    assert body.masked == ("a.password", "list.0.email", "list.2.0.token", "card")
    assert not body.revealed
    assert not body.truncated


def test_twice_the_same_name() -> None:
    """A name that comes twice in an object is masked twice."""
    text = MASKED.body(JSON, b'{"pwd": "one", "x": 1, "pwd": "two", "x": 2}').text or ""
    assert "one" not in text
    assert "two" not in text
    assert text.count('"x"') == 2


def test_json_in_a_text() -> None:
    """A text that is JSON itself is masked as a whole if it holds what would be masked, however deep it is packed."""
    packed = json.dumps({"inner": json.dumps([json.dumps({"password": "x"})])})
    harmless = json.dumps({"a": 1})
    assert shown(json.dumps({"one": packed, "two": harmless, "three": "{no json", "four": [packed]})) == {
        "one": MASK, "two": harmless, "three": "{no json", "four": [MASK],
    }  # fmt: skip
    assert MASKED.headers({"context": packed, "plain": harmless}) == {"context": MASK, "plain": harmless}


@pytest.mark.parametrize(
    "value",
    ["12.30", "1.10", "1e400", "-0", "-0.0", "0.1000000000000000055511151231257827", "12345678901234567890123456789",
     "1E+2", "9" * 5000, "true", "null", '"\\u00e9\\ud800"', '"a\\"]},:b"', '"<script>"', "[]", "{}", "NaN",
     "-Infinity"],
)  # fmt: skip
def test_values_stay_as_they_are_written(value: str) -> None:
    """No number is rounded and no text spelled anew, masked or not."""
    for redactor in (MASKED, FULL):
        text = redactor.body(JSON, f'{{"a":{value},"b":[{value}]}}'.encode()).text or ""
        assert re.sub(r"\s", "", text) == f'{{"a":{value},"b":[{value}]}}'


def test_white_space_between_tokens_is_ours() -> None:
    """JSON is shown with a line for each member."""
    body = FULL.body(JSON, b'\r\n{"a" :[1,\t{ } ,[ ]],"b":{"c":"d e"}}\n')
    assert body.text == '{\n  "a": [\n    1,\n    {},\n    []\n  ],\n  "b": {\n    "c": "d e"\n  }\n}'


@pytest.mark.parametrize(
    ("content_type", "raw"),
    [
        ("text/plain", b"my password is x"), ("text/html", b"<script>"), ("application/xml", b"<password/>"),
        ("application/x-www-form-urlencoded", b"password=x"), (JSON, b'"a text alone"'), (JSON, b"4111111111111111"),
        (JSON, b'{"a": '), (JSON, b""), (JSON, b"[" * 100_000 + b"]" * 100_000), (JSON, b'{"a": "\xff"}'),
        (JSON, b'{"a": "\x00"}'), ("application/octet-stream", b"{}"), ("", b"{}"), ("image/png", b"\x89PNG"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_hidden(content_type: str, raw: bytes) -> None:
    """Without names there is nothing to judge a value by: nothing of it is shown, but its size."""
    body = MASKED.body(content_type, raw)
    assert (body.text, body.size, body.content_type, body.masked) == (None, len(raw), content_type, ())


@pytest.mark.parametrize(
    ("content_type", "raw", "text"),
    [
        ("text/plain; charset=utf-8", "grüße\0".encode(), "grüße\0"), ("TEXT/HTML", b"<script>", "<script>"),
        (JSON, b'"alone"', '"alone"'), (JSON, b'{"a": ', '{"a": '), ("application/problem+json", b"[1]", "[\n  1\n]"),
        ("application/soap+xml", b"<a/>", "<a/>"), ("text/plain", b"\xff", None),
        ("application/octet-stream", b"ok", None), ("image/svg", b"<svg/>", None),
    ],
)  # fmt: skip
def test_revealed_and_full(content_type: str, raw: bytes, text: str | None) -> None:
    """Texts are shown as they are where that is wanted; what isn't text never is."""
    assert FULL.body(content_type, raw).text == text
    assert MASKED.body(content_type, raw, reveal=True).text == text
    assert HIDDEN.body(content_type, raw, reveal=True).text == text


def test_revealed_is_unmasked() -> None:
    """A revealed body says so, and nothing of it is masked; headers and results alike."""
    body = MASKED.body(JSON, b'{"password": "x"}', reveal=True)
    assert json.loads(body.text or "") == {"password": "x"}
    assert (body.revealed, body.masked) == (True, ())
    assert MASKED.headers({"cookie": "x"}, reveal=True) == {"cookie": "x"}
    assert MASKED.document({"card": 1}, reveal=True) == {"card": 1}


def test_hidden_shows_nothing() -> None:
    """Where bodies are hidden, so are the values of headers and results."""
    assert HIDDEN.body(JSON, b'{"a": 1}').text is None
    assert HIDDEN.headers({"trace": "1"}) == {"trace": MASK}
    assert HIDDEN.document({"a": 1}) == MASK
    assert HIDDEN.document(None) is None


def test_documents_that_were_read() -> None:
    """The result of a compensation is masked as a body is."""
    document = {"ok": [1.5, {"iban": "DE"}], "text": '{"pwd": 1}', "none": None}
    assert MASKED.document(document) == {"ok": [1.5, {"iban": MASK}], "text": MASK, "none": None}
    assert FULL.document(document) == document


@pytest.mark.parametrize("redactor", [Redactor(limit=100), Redactor("full", limit=100)], ids=["masked", "full"])
def test_long_bodies_are_cut(redactor: Redactor) -> None:
    """More than the limit isn't shown, never half of a character; that there is more is told."""
    long = json.dumps({"note": "é" * 1000}, ensure_ascii=False).encode()
    body = redactor.body(JSON, long)
    assert body.truncated
    assert body.size == len(long)
    assert 97 <= len((body.text or "").encode()) <= 100
    short = redactor.body(JSON, b'{"a": 1}')
    assert not short.truncated


def test_masked_beyond_the_limit() -> None:
    """What is cut off isn't told of either; a large body costs no more than its shown part."""
    body = Redactor(limit=50).body(JSON, json.dumps({"a": "x" * 80, "password": "y"}).encode())
    assert (body.truncated, body.masked) == (True, ())


def test_own_names() -> None:
    """Other names can be masked instead, by a pattern of words."""
    redactor = Redactor(keys=r"konto(nummer)?|gehalt")
    assert shown('{"kontoNummer": 1, "GEHALT": 2, "password": 3}', redactor) == {
        "kontoNummer": MASK, "GEHALT": MASK, "password": 3,
    }  # fmt: skip
    assert Redactor(keys=re.compile("salary")).masks("baseSalary")


@pytest.mark.parametrize("wrong", [{"display": "some"}, {"keys": "("}, {"limit": 0}])
def test_settings_that_are_none(wrong: dict[str, Any]) -> None:
    """What makes no sense is refused at once."""
    with pytest.raises(InvalidSettings):
        Redactor(**wrong)


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("order.id", "42", True), ("order.id", "42.0", False), ("order.amount", "12.30", True),
        ("order.amount", "12.3", False),
        ("order.lines.0.name", "a", True), ("order.lines.1.name", "b", True), ("order.lines.2.name", "b", False),
        ("order.lines.-1.name", "b", False), ("order.paid", "true", True), ("order.paid", "True", False),
        ("order.none", "null", True), ("order.none", "", False), ("order", "42", False), ("order.id.x", "42", False),
        ("order.lines", "a", False), ("", "42", False),
        ("big", "12345678901234567890123", True), ("order.empty", "", True),
    ],
)  # fmt: skip
def test_values_at_a_path(path: str, value: str, found: bool) -> None:
    """A value in a body is compared as it is written."""
    raw = b"""{"order": {"id": 42, "amount": 12.30, "lines": [{"name": "a"}, {"name": "b"}], "paid": true, "none": null,
               "empty": ""}, "big": 12345678901234567890123}"""
    assert has_at(raw, path, value) is found


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000, b"null", b"7"])
def test_values_in_what_is_no_document(raw: bytes) -> None:
    """What can't be read has no values."""
    assert not has_at(raw, "a", "b")
