"""Taking secrets out of a text ends, and soon, whatever the body is that they are in; and cannot fail."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from urllib.parse import quote
from uuid import uuid4

import pytest

from outbox.errors import was_interrupted
from outbox.message.content import Codecs
from outbox.message.masking import NAMES, leaves
from outbox.message.model import Message
from outbox.text import MASK, error_text, without


def nested_form(levels: int) -> str:
    """Return a form in a form in a form, with a card in the innermost one."""
    text = "card=4111111111111111"
    for _ in range(levels):
        text = f"a={quote(text, safe='')}"
    return text


@pytest.mark.parametrize("levels", [3, 40])
def test_texts_in_texts(levels: int) -> None:
    """A few are read; of more, what lies inside is a secret as a whole."""
    found = set(NAMES.secrets_in(nested_form(levels)))
    assert ("4111111111111111" in found) == (levels == 3)
    assert any("4111111111111111" in each for each in found)


def test_a_body_that_no_parser_ends_with() -> None:
    """Where reading the body fails, the body and the headers are secrets as they are."""

    class Endless(Codecs):
        def as_json(self, raw: bytes, content_type: str) -> bytes | None:
            raise RecursionError(f"{content_type} of {len(raw)} bytes")

    now = dt.datetime.now(dt.UTC)
    message: Message = Message(
        uuid4(), "t", 0, 1, None, None, "text/plain", b"abc", now, now, headers={"h": "v"}, codecs=Endless()
    )
    assert message.secrets == {"abc", "v"}


def test_a_wide_list_that_lies_deep() -> None:
    """Its places are told one by one: all of them at once would take far more memory than the document."""

    class Wide(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield 7
            pytest.fail("it is read on, before its first place was used")

    assert next(leaves({"a": Wide([0])})) == (("a", 0), "7")


def test_more_secrets_than_a_pattern_takes() -> None:
    """A text that quotes very many of them is hidden as a whole."""
    many = {f"secret-{number:05}" for number in range(2000)}
    assert without(" ".join(sorted(many)), many) == MASK


def test_a_secret_that_the_window_cuts() -> None:
    """Of one that is longer than is searched, the end is found, too."""
    secret = "".join(f"{number:05}" for number in range(20_000))
    assert secret[-50:] not in error_text(ValueError(f"bad {secret}"), {secret})


@pytest.mark.parametrize("secret", ["abcd\0ef12", "hunter2\ufffd"])
def test_what_a_text_cannot_hold(secret: str) -> None:
    """A secret with what PostgreSQL refuses is found as the text has it."""
    shown = secret.replace("\0", "")
    assert shown not in without(f"bad {shown}!", {secret})


def test_a_time_of_day_is_no_code() -> None:
    """A code of six digits masks no time; grouped by a blank it is found."""
    assert without("at 12:34:56", {"123456"}) == "at 12:34:56"
    assert "123 456" not in without("code 123 456", {"123456"})


def test_errors_that_are_behind_each_other() -> None:
    """A circle of causes ends; a Ctrl-C behind any of them is found."""
    first, second = ValueError(1), ValueError(2)
    first.__cause__, second.__cause__ = second, first
    assert not was_interrupted(first)
    second.__context__ = KeyboardInterrupt()
    assert was_interrupted(first)
