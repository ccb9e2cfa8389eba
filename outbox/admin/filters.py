"""What every filter is checked for before the database sees it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

from outbox.errors import InvalidRequest
from outbox.text import storable

_LONGEST = 1_000


def check_filter(wanted: object, *, texts: Iterable[str] = (), times: Iterable[str] = ()) -> None:
    """See that these fields of a filter hold texts that the database takes, and times with a zone; None is neither.

    Raises:
        InvalidRequest: one doesn't; its ``field`` is named.
    """
    for name in texts:
        check_text(getattr(wanted, name), name)
    for name in times:
        moment = getattr(wanted, name)
        if moment is not None and (not isinstance(moment, dt.datetime) or moment.utcoffset() is None):
            raise InvalidRequest(f"{name} {moment} has no time zone; add one, such as Z", field=name)


def check_text(value: str | None, name: str) -> None:
    """See that a text is one that the database takes.

    Raises:
        InvalidRequest: it has a NUL or half a surrogate pair in it, or is longer than anything it could equal.
    """
    if value is None:
        return
    if len(value) > _LONGEST:
        raise InvalidRequest(f"{name} has {len(value)} characters; at most {_LONGEST} are looked for", field=name)
    if storable(value) != value:
        raise InvalidRequest(f"{name} {storable(value)!r} has a character that is in no stored text", field=name)


def check_words(values: Iterable[str], allowed: Iterable[str], name: str) -> None:
    """See that all values are among those allowed.

    Raises:
        InvalidRequest: one isn't.
    """
    known = [str(word) for word in allowed]
    for value in values:
        if value not in known:
            raise InvalidRequest(f"{name} {value[:40]!r} is unknown; there are: {', '.join(known)}", field=name)
