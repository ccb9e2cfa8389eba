"""From when until when: by the clock of the database, and the same on the pages that follow."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from outbox.admin.model import Page
from outbox.cli.arguments import as_time
from outbox.cli.exits import Code, Failure

if TYPE_CHECKING:
    from outbox.admin.service import Admin

T = TypeVar("T")

SinceOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="Not older: 90s, 15m, 2h, 3d, or 2026-01-31T12:00:00+00:00.")
]
UntilOption = Annotated[str | None, typer.Option(metavar="TIME", help="Older than that, given likewise.")]

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Span:
    """Two times, either may be open, and the token of a page.

    A page's token is one of the very same filter, and ``15m`` ago is another time at each call. So what is given on to
    the next call also has the times that a duration has led to.
    """

    since: dt.datetime | None = None
    until: dt.datetime | None = None
    token: str | None = None
    moving: bool = False

    @classmethod
    def of(cls, admin: Admin, since: str | None, until: str | None, after: str | None = None) -> Span:
        """Return the times of the options, as they were at the first page.

        Raises:
            Failure: one of them can't be read.
        """
        given = [
            as_time(text, name) if text else (None, None) for text, name in ((since, "--since"), (until, "--until"))
        ]
        moving = any(seconds is not None for _, seconds in given)
        if not moving:
            return cls(given[0][0], given[1][0], after)
        if after is None:
            now = _now(admin)
            times = [now - dt.timedelta(seconds=seconds) if seconds is not None else time for time, seconds in given]
            return cls(times[0], times[1], None, moving)
        token, *moments = after.split(".")
        try:
            first, last = (_EPOCH + int(text) * _MICROSECOND if text else None for text in moments)
        except (ValueError, OverflowError):
            raise Failure(f"--after {after!r} isn't what the end of this list told", Code.USAGE) from None
        return cls(first, last, token, moving)

    def onward(self, page: Page[T]) -> Page[T]:
        """Return the page with a token that brings these times along."""
        if page.next_page_token is None or not self.moving:
            return page
        moments = ["" if time is None else str((time - _EPOCH) // _MICROSECOND) for time in (self.since, self.until)]
        return replace(page, next_page_token=".".join([page.next_page_token, *moments]))


def _now(admin: Admin) -> dt.datetime:
    from outbox.store.execute import execute  # noqa: PLC0415
    from outbox.store.stats import now  # noqa: PLC0415

    database = next(iter(admin.databases.values()))
    with database.looking() as connection:
        ((time,),) = execute(connection, now())[0]
    return time  # type: ignore[no-any-return]
