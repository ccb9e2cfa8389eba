"""From what a browser sends to filters: text fields in a URL or a form, each checked, with its name if it is wrong."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Sequence
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import parse_qsl, urlencode
from uuid import UUID

from starlette.datastructures import ImmutableMultiDict

from outbox.errors import InvalidRequest
from outbox.operator.model import (
    AuditFilter,
    BulkJobFilter,
    BulkJobState,
    HalfFilter,
    HalfStatus,
    InboxFilter,
    MessageFilter,
    ScheduledFilter,
)

E = TypeVar("E", bound=enum.StrEnum)

#: Spans that can be picked instead of a moment.
PERIODS = MappingProxyType(
    {
        "15m": ("last 15 minutes", dt.timedelta(minutes=15)),
        "1h": ("last hour", dt.timedelta(hours=1)),
        "24h": ("last 24 hours", dt.timedelta(hours=24)),
        "7d": ("last 7 days", dt.timedelta(days=7)),
        "30d": ("last 30 days", dt.timedelta(days=30)),
    }
)

_LONGEST = 500


class Fields:
    """Fields by name. What is empty counts as not given.

    Raises (all of its methods):
        InvalidRequest: a value that isn't one; names the field.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._fields = ImmutableMultiDict([(name, value.strip()) for name, value in pairs if value.strip()])

    @classmethod
    def of_query(cls, query: str) -> Fields:
        """Return the fields of a query."""
        return cls(parse_qsl(query, keep_blank_values=False, max_num_fields=200))

    def only(self, names: Sequence[str]) -> Fields:
        """Return the fields of these names."""
        return Fields([(name, value) for name, value in self._fields.multi_items() if name in names])

    def without(self, name: str, value: str) -> Fields:
        """Return all but one field."""
        return Fields([pair for pair in self._fields.multi_items() if pair != (name, value)])

    def pairs(self) -> list[tuple[str, str]]:
        """Return names and values, as they were given."""
        return list(self._fields.multi_items())

    def query(self) -> str:
        """Return the fields as a query."""
        return urlencode(self.pairs())

    def text(self, name: str) -> str | None:
        """Return a text."""
        value = self._fields.get(name)
        if value is not None and len(value) > _LONGEST:
            raise InvalidRequest(f"{name} has {len(value)} characters; at most {_LONGEST} are looked for", name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return all texts of a name."""
        return tuple(self._fields.getlist(name))

    def moment(self, name: str) -> dt.datetime | None:
        """Return a moment: ISO 8601, in UTC where it doesn't say otherwise."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = dt.datetime.fromisoformat(text)
            return value if value.tzinfo else value.replace(tzinfo=dt.UTC)
        except ValueError:
            raise InvalidRequest(f"{name} {text!r} must be a time like 2026-05-24T13:30 (UTC)", name) from None

    def since(self) -> dt.datetime | None:
        """Return the moment from which on to look: ``since``, or the begin of the span ``within``."""
        period = self.text("within")
        if period is None:
            return self.moment("since")
        if period not in PERIODS:
            raise InvalidRequest(f"within {period!r} must be one of: {', '.join(PERIODS)}", "within")
        return (dt.datetime.now(dt.UTC) - PERIODS[period][1]).replace(microsecond=0)

    def uuid(self, name: str) -> UUID | None:
        """Return an id."""
        text = self.text(name)
        try:
            return None if text is None else UUID(text)
        except ValueError:
            raise InvalidRequest(f"{name} {text!r} isn't an id; ids look like 01975a5e-…", name) from None

    def count(self, name: str, *, least: int = 0, most: int = 2**31 - 1) -> int | None:
        """Return a whole number."""
        text = self.text(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
            raise InvalidRequest(f"{name} {text[:40]!r} must be a whole number from {least} to {most}", name)
        return int(text)

    def number(self, name: str) -> float | None:
        """Return a number over 0."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < 1e9:
            raise InvalidRequest(f"{name} {text[:40]!r} must be a number over 0", name)
        return value

    def pair(self, name: str) -> tuple[str, str] | None:
        """Return a name and a value, written with ``=`` between them."""
        text = self.text(name)
        if text is None:
            return None
        left, equals, right = text.partition("=")
        if not equals or not left.strip():
            raise InvalidRequest(f"{name} {text[:80]!r} must be written as name=value", name)
        return left.strip(), right.strip()

    def flag(self, name: str) -> bool | None:
        """Return yes or no."""
        text = self.text(name)
        if text not in {None, "yes", "no"}:
            raise InvalidRequest(f"{name} {text!r} must be yes or no", name)
        return None if text is None else text == "yes"


def fixed(fields: Fields) -> Fields:
    """Return the same fields with a moment in the place of a span, so that they mean the same a minute later."""
    since = fields.since()
    rest = [(name, value) for name, value in fields.pairs() if name not in {"within", "since"}]
    return Fields([*rest, ("since", since.isoformat())]) if since else Fields(rest)


def message_filter(fields: Fields) -> MessageFilter:
    """Return which messages are wanted."""
    return MessageFilter(
        database=fields.text("database"),
        status=fields.texts("status"),  # type: ignore[arg-type]
        topic=fields.text("topic"),
        key=fields.text("key"),
        tag=fields.text("tag"),
        producer_group=fields.text("producer_group"),
        since=fields.since(),
        until=fields.moment("until"),
        header=fields.pair("header"),
        body=fields.pair("body"),
    )


def inbox_filter(fields: Fields) -> InboxFilter:
    """Return which inbox rows are wanted."""
    return InboxFilter(
        database=fields.text("database"),
        status=fields.texts("status"),  # type: ignore[arg-type]
        group=fields.text("group"),
        topic=fields.text("topic"),
        message_id=fields.uuid("message"),
        fingerprint=fields.text("fingerprint"),
        error=fields.text("error"),
        attempts_gte=fields.count("attempts"),
        since=fields.since(),
        until=fields.moment("until"),
        discarded=fields.flag("discarded"),
    )


def half_filter(fields: Fields) -> HalfFilter:
    """Return which undecided halves are wanted."""
    minutes = fields.number("age")
    return HalfFilter(
        database=fields.text("database"),
        topic=fields.text("topic"),
        status=_word(fields, "status", HalfStatus),
        min_age=None if minutes is None else minutes * 60,
    )


def scheduled_filter(fields: Fields) -> ScheduledFilter:
    """Return which scheduled messages are wanted."""
    return ScheduledFilter(
        database=fields.text("database"), topic=fields.text("topic"), recalled=bool(fields.flag("recalled"))
    )


def audit_filter(fields: Fields) -> AuditFilter:
    """Return which audited acts are wanted."""
    return AuditFilter(
        database=fields.text("database"),
        actor=fields.text("actor"),
        action=fields.text("action"),
        target=fields.text("target"),
        since=fields.since(),
        until=fields.moment("until"),
    )


def bulk_job_filter(fields: Fields) -> BulkJobFilter:
    """Return which bulk jobs."""
    return BulkJobFilter(database=fields.text("database"), state=_word(fields, "state", BulkJobState))


def _word(fields: Fields, name: str, words: type[E]) -> E | None:
    text = fields.text(name)
    try:
        return None if text is None else words(text)
    except ValueError:
        raise InvalidRequest(f"{name} {text!r} must be one of: {', '.join(words)}", name) from None
