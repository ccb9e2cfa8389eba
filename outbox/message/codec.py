"""Bodies to bytes and back, by content type.

str is ``text/plain``, bytes are ``application/octet-stream``, everything else is ``application/json``:
pydantic models and dataclasses by their own rules, dicts and lists with Decimal, UUID, Enum, date and
time written as strings (so that an amount of money never becomes a float on its way).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from typing import Any
from uuid import UUID

from outbox.errors import InvalidHandler, InvalidMessage, pip_install

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
BYTES = "application/octet-stream"


def encode(body: Any) -> tuple[bytes, str]:
    """Return the bytes and the content type of a body.

    Raises:
        InvalidMessage: the body has no encoding; names the type or the value that has none.
    """
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), BYTES
    if isinstance(body, str):
        try:
            return body.encode(), TEXT
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"the body has a character that UTF-8 can't hold: {error}") from None
    try:
        if hasattr(body, "model_dump_json") and not isinstance(body, type):
            return body.model_dump_json().encode(), JSON
        text = json.dumps(body, default=_plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode(), JSON
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage(
            f"the body of type {type(body).__name__} can't be encoded as JSON: {error}; "
            "send a dict, a dataclass, a pydantic model, str or bytes"
        ) from None


def _plain(value: Any) -> Any:
    """Encode what JSON doesn't know and business data is full of."""
    if hasattr(value, "model_dump") and not isinstance(value, type):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    for kinds, plain in _PLAIN:
        if isinstance(value, kinds):
            return plain(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


_PLAIN: tuple[tuple[tuple[type, ...], Callable[[Any], Any]], ...] = (
    ((Decimal, UUID), str),
    ((dt.datetime, dt.date, dt.time), lambda value: value.isoformat()),
    ((dt.timedelta,), lambda value: value.total_seconds()),
    ((enum.Enum,), lambda value: value.value),
    ((set, frozenset), sorted),
)


def is_json(content_type: str) -> bool:
    """Tell whether bodies of a content type are JSON."""
    kind = _kind(content_type)
    return kind == JSON or kind.endswith("+json")


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def decode(raw: bytes, content_type: str, model: Any = None, *, exact: bool = False) -> Any:
    """Return the body of ``raw``; as ``model`` (pydantic model, dataclass or any type) if given.

    ``exact`` makes JSON numbers with a fraction Decimals, not floats.

    Raises:
        InvalidMessage: the bytes don't fit the content type or the model.
    """
    kind = _kind(content_type)
    try:
        if model is not None and is_json(content_type):
            return _adapter(model).validate_json(raw)
        value: Any = raw
        if is_json(content_type):
            value = json.loads(raw, parse_float=Decimal if exact else None)
        elif kind.startswith("text/"):
            value = raw.decode()
        return value if model is None else _adapter(model).validate_python(value)
    except (ValueError, RecursionError) as error:
        wanted = f" as {getattr(model, '__name__', model)}" if model is not None else ""
        raise InvalidMessage(f"the body ({content_type}) can't be read{wanted}: {error}") from error


@cache
def _adapter(model: Any) -> Any:
    try:
        from pydantic import TypeAdapter  # noqa: PLC0415 - optional dependency
    except ImportError:
        raise InvalidHandler(f"reading bodies as {model!r} needs pydantic: {pip_install('pydantic')}") from None
    return TypeAdapter(model)
