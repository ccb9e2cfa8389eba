"""Texts for people, and texts that the database takes: an error that can't be stored would hold up its row for ever."""

from __future__ import annotations

import traceback

_SUMMARY_CHARS = 1000
_TRACE_CHARS = 4000


def storable(value: object) -> str:
    """Return the value as a text without what PostgreSQL refuses."""
    return str(value).replace("\0", "").encode("utf-8", "backslashreplace").decode()


def summary_of(error: BaseException) -> str:
    """Return an exception's type and message, cut to a length that is fit to be shown."""
    return storable("".join(traceback.format_exception_only(error)).strip())[:_SUMMARY_CHARS]


def plain(text: str) -> str:
    """Return a text with control characters written out: what is in a message must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def duration(seconds: float) -> str:
    """Return a duration for people: ``4.2s``, ``3m10s``, ``5h07m``, ``2d04h``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, second = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{second:02}s"
    hours, minute = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minute:02}m"
    return f"{hours // 24}d{hours % 24:02}h"


def error_text(error: BaseException) -> str:
    """Return an exception's summary, an empty line, and the end of its traceback."""
    text = storable("".join(traceback.format_exception(error)))
    return f"{summary_of(error)}\n\n{text[-_TRACE_CHARS:]}"
