"""What `outbox.errors.passing` makes does what Python's own context managers of generators do; and lets all pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outbox.errors import passing
from tests.kit.hostile import HOSTILE, LEAVING

MAKERS: dict[str, Callable[..., Any]] = {"ours": passing, "python's": contextmanager}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_as_python_does(make: Callable[..., Any]) -> None:
    """What is yielded is had; the end is reached; an exception can be kept in, or another raised in its place."""
    seen: list[object] = []

    @make
    def block(kept: type[BaseException] = LookupError) -> Iterator[int]:
        try:
            yield 7
        except kept as error:
            seen.append(error)
        except ZeroDivisionError as error:
            raise ValueError("another") from error
        finally:
            seen.append("end")

    with block() as value:
        assert value == 7
    with block():
        raise LookupError
    with pytest.raises(ValueError, match="another"), block():
        raise ZeroDivisionError
    with block(StopIteration):
        raise StopIteration
    assert [type(each).__name__ for each in seen] == ["str", "LookupError", "str", "str", "StopIteration", "str"]


@pytest.mark.parametrize("name", HOSTILE | LEAVING)
def test_every_exception_passes(name: str) -> None:
    """The very same, with the traceback that it had: none of our own lines."""

    @passing
    def block() -> Iterator[None]:
        try:
            yield
        finally:
            pass

    error, caught, lines = (HOSTILE | LEAVING)[name](), None, []
    try:
        with block(), block():
            raise error
    except BaseException as raised:
        caught, trace = raised, BaseException.__dict__["__traceback__"].__get__(raised)
        while trace is not None:
            lines.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
    assert caught is error
    assert set(lines) == {"test_every_exception_passes"}
