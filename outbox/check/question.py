"""Put one question to a checker, and read its answer: only a Resolution is one, everything else is UNKNOWN."""

from __future__ import annotations

import inspect
import time
from typing import Any

from outbox.check.checker import Checker
from outbox.joined import JoinedSession, wait_for
from outbox.model import Answer, Orphan, Resolution
from outbox.text import error_text, storable

_SHOWN = 200


def ask(checker: Checker, orphan: Orphan, joined: JoinedSession | None) -> Answer:
    """Call the checker; whatever it raises or returns becomes an answer.

    ``joined`` gives the session for a checker that takes one.
    """
    began = time.monotonic()
    try:
        given = checker.function(orphan, joined.open()) if joined else checker.function(orphan)
        if checker.is_async:
            given = wait_for(given)
    except Exception as error:
        return Answer(Resolution.UNKNOWN, error_text(error), time.monotonic() - began)
    seconds = time.monotonic() - began
    if joined and joined.rolled_back:
        return Answer(Resolution.UNKNOWN, "the checker rolled its session back", seconds)
    return _read(given, seconds)


def _read(given: Any, seconds: float) -> Answer:
    # A str that spells a resolution is refused as well: whoever returns one may just as well return "ok".
    if isinstance(given, Resolution):
        return Answer(given, None, seconds)
    if inspect.iscoroutine(given):
        given.close()
        return Answer(Resolution.UNKNOWN, "the checker returned a coroutine: declare it with 'async def'", seconds)
    shown = storable(repr(given))[:_SHOWN]
    kind = "" if given is None else f" ({type(given).__name__})"
    return Answer(Resolution.UNKNOWN, f"the checker returned {shown}{kind}, which is not a Resolution", seconds)
