"""Where a group begins to read a topic, as its declaration or an operator says it."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import cast

from outbox.errors import InvalidRequest
from outbox.message.model import Start

_PAIR = re.compile(r"(\d+):(\d+)")
_BY_QUEUE = re.compile(r"\d+:\d+(,\d+:\d+)*")
#: The values of a `Start`, as errors name them.
STARTS = "'first' or 'now', a datetime with a time zone, a position (1 or more), or positions by queue"


def is_start(value: object) -> bool:
    """Tell whether a value says where a group begins."""
    if isinstance(value, Mapping):
        return all(_is_number(queue, 0) and _is_number(position, 1) for queue, position in value.items())
    if isinstance(value, dt.datetime):
        return value.tzinfo is not None
    return _is_number(value, 1) or (isinstance(value, str) and value in {"first", "now"})


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def start_from_text(text: str) -> Start:
    """Return the start that a text is: ``first``, ``now``, a position, ``QUEUE:POSITION,…``, or a time in ISO 8601.

    Raises:
        InvalidRequest: it is none of these.
    """
    try:
        if text in {"first", "now"}:
            start: object = text
        elif _BY_QUEUE.fullmatch(text):
            start = {int(queue): int(position) for queue, position in _PAIR.findall(text)}
        else:
            start = int(text) if text.isdecimal() else dt.datetime.fromisoformat(text)
    except ValueError:
        start = None
    if not is_start(start):
        raise InvalidRequest(f"{text!r} must be {STARTS} (QUEUE:POSITION,…), or how long ago (3d, 1h30m)", field="to")
    return cast("Start", start)
