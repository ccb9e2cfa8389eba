"""The kind of an error: what failures with one cause have in common, and only those."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from pydantic import BaseModel
from sqlalchemy.util import greenlet_spawn

from outbox.database.session import wait_for
from outbox.text import error_text, kind_of_error, kind_of_text, summary_of, without_addresses


def _caught(function: object, *arguments: object) -> Exception:
    try:
        function(*arguments)  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def _credit(account: str) -> None:
    raise KeyError(f"no account {account}")


def _outer(account: str) -> None:
    _credit(account)


def test_two_values_are_one_kind() -> None:
    """The message doesn't count, nor the line; class and function do."""
    assert kind_of_error(_caught(_credit, "7")) == kind_of_error(_caught(_credit, "8"))
    assert kind_of_error(_caught(_credit, "7")) == "KeyError in test_text.py:_credit"


def test_the_innermost_function_counts() -> None:
    """Two ways into the function that fails are one kind."""
    assert kind_of_error(_caught(_outer, "7")) == "KeyError in test_text.py:_credit"


def test_a_library_is_not_to_blame() -> None:
    """The function that called the library is named, not where in the library it ended."""

    def read(text: str) -> object:
        return json.loads(text)

    kind = kind_of_error(_caught(read, "{"))
    assert kind == "JSONDecodeError in test_text.py:test_a_library_is_not_to_blame.<locals>.read"


def test_an_async_function_is_named_too() -> None:
    """SQLAlchemy's functions, which lie between this package and a coroutine, are not."""

    async def credit() -> None:
        _credit("7")

    def call() -> None:
        asyncio.run(greenlet_spawn(lambda: wait_for(credit())))

    assert kind_of_error(_caught(call)) == "KeyError in test_text.py:_credit"


def test_an_error_without_a_trace() -> None:
    """One that was never raised has a class all the same."""
    assert kind_of_error(ValueError("x")) == "ValueError"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("no account AB-71000001 at bank B", "no account … at bank B"),
        ("no account CD-2 at bank B\nand more", "no account … at bank B"),
        ("unknown currency 'XXX'", "unknown currency …"),
        ("message 0190b2c4-1f2e-7c3a-8d4e-5f6a7b8c9d0e: late", "message …: late"),
        ("no way to db.internal:5432/shop", "no way to ***"),
        ("gone", "gone"),
        ("", ""),
    ],
)
def test_what_varies_is_left_out(text: str, kind: str) -> None:
    """Numbers, ids and quoted values vary from message to message."""
    assert kind_of_text(text) == kind


def test_a_long_text_makes_a_short_kind() -> None:
    """A kind is fit for an index, however long the error is."""
    assert len(kind_of_text("x1" * 10_000_000)) <= 200
    assert len(kind_of_text("of y" * 10_000_000)) == 200


def test_times_versions_and_casts_are_no_addresses() -> None:
    """What only looks like one stays; a long word costs no more than its length."""
    text = "at 10:30:45, version 17.2.1 and 1.2.3.4.5, 'x'::date, std::bad_alloc, tests/a.py::test_b, took 3:07"
    assert without_addresses(text) == text
    long = "a1:" * 100_000
    assert without_addresses(f"{long} by 10.1.2.3") == f"{long} by ***"


class _Card(BaseModel):
    number: int


def _refused(**values: object) -> Exception:
    return _caught(_Card.model_validate, values)


def test_values_that_pydantic_refused_are_not_told() -> None:
    """Not of the error itself, of one behind it, of one that quotes it, nor of those in a group."""
    refused = _refused(number="4111 , input_type=str]\n22")
    quoted = _caught(_raise, RuntimeError(f"no card: {refused}"))
    quoted.__cause__ = _refused(number="3333x")
    quoted.__context__ = refused
    group = ExceptionGroup("two", [refused, ExceptionGroup("one", [ValueError("x"), _refused(number="5555x")])])
    for error in (refused, quoted, group):
        for text in (error_text(error), summary_of(error)):
            assert not re.search("4111|22|3333|5555", text), text
    assert summary_of(refused).endswith("ValidationError: number: Input should be a valid integer, unable to parse "
                                        "string as an integer")  # fmt: skip
    assert error_text(group).count("number: Input should be a valid integer") == 2


def _raise(error: Exception) -> None:
    raise error


def test_an_error_that_goes_in_a_circle_is_told() -> None:
    """Its causes are looked at once."""
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert summary_of(first) == "ValueError: a"


def test_secrets_are_taken_out_before_a_text_is_cut() -> None:
    """Of one that was cut in two, neither part would be found: in the summary's end, and at the trace's beginning."""
    secret = "secret-" + "0123456789" * 3
    for before in range(950, 1000):
        error = _caught(_say, "x" * before + secret + "y" * 3950)
        assert "secret-" not in error_text(error, {secret})
        assert "0123" not in error_text(error, {secret})
        assert len(summary_of(error, {secret})) == 1000


def _say(text: str) -> None:
    raise ValueError(text)
