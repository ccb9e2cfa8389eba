"""The nouns of a reconciliation: what is compared, what may differ, what is done about it.

The shape of what is compared: Arrow tables of either side, and of what the comparison finds.

Times are microseconds since 1970 in UTC, ids 16 bytes. A table of a side is sorted by id, and has each id once.
"""

from __future__ import annotations

import datetime as dt
import enum
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa

from outbox.errors import InvalidSettings
from outbox.message.limits import check_group, check_topic
from outbox.settings import Settings

#: The first of all ids, and the first of a range that holds them all.
FIRST_ID = UUID(int=0)

_EPOCH = dt.datetime.fromtimestamp(0, dt.UTC)
_MILLISECOND = dt.timedelta(milliseconds=1)

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)


class Outcome(enum.IntEnum):
    """What comparing the two sides of one message comes to; the number travels in Arrow tables.

    Up to `UNJUDGED` nothing is wrong, and the message is only counted. From `CONSUMED_THOUGH_ROLLED_BACK` on it is a
    difference; of several that fit one message the first in this order is its kind.
    """

    CONSUMED = 0  # committed, dispatched, consumed
    ROLLED_BACK = 1  # rolled back or recalled, and never seen by the consumer; or compensated, and quarantined there
    LEFT_OUT = 2  # the group's filter leaves it out, or it was sent before the group began
    IN_FLIGHT = 3  # on its way, younger than the grace period, or scheduled for later
    UNJUDGED = 4  # only the consumer has it, and the producer may have pruned it

    CONSUMED_THOUGH_ROLLED_BACK = 10  # took effect, though the producer rolled it back, recalled or compensated it
    DUPLICATE_EFFECT = 11  # the business table has more than one row of it
    PHANTOM = 12  # the consumer has it; the producer never wrote it, never decided it, or it isn't due yet
    DIGEST_MISMATCH = 13  # committed, and the body that the producer has isn't the one that the consumer handled
    NO_EFFECT = 14  # consumed, and the business table has no row of it
    UNRECORDED = 15  # it took effect, and the inbox has no row of it
    STATUS_MISMATCH = 16  # the inbox contradicts the producer or the business table; which of them is right is known
    UNCOMPENSATED = 17  # quarantined at the consumer, and the producer's transaction was never compensated
    UNDISPATCHED = 18  # committed (or scheduled, and overdue), and no message
    RESEND_EXHAUSTED = 19  # missing, and resent as often as is allowed
    MISSING = 20  # the consumer has read past it, and doesn't know it
    UNCONSUMED = 21  # the consumer hasn't come so far
    PARKED = 22  # set aside by the consumer (dead letter)
    FAILED = 23  # the consumer is going to retry it
    UNDECIDED = 24  # no op, for longer than the grace period

    @property
    def label(self) -> str:
        """The name that people see: ``digest_mismatch``."""
        return self.name.lower()

    @property
    def differs(self) -> bool:
        """Is it a difference?"""
        return self >= Outcome.CONSUMED_THOUGH_ROLLED_BACK


#: The differences, gravest first.
KINDS: tuple[Outcome, ...] = tuple(outcome for outcome in Outcome if outcome.differs)


class ProducerState(enum.IntEnum):
    """How far a message has come in the producer's tables."""

    UNDECIDED = 0
    ROLLED_BACK = 1
    COMMITTED = 2
    SCHEDULED = 3
    RECALLED = 4
    DISPATCHED = 5


class InboxState(enum.IntEnum):
    """What the consumer's inbox says of a message; 0 where only the business table has it."""

    NONE = 0
    CONSUMED = 1
    FAILED = 2
    PARKED = 3
    QUARANTINED = 4


class Action(enum.StrEnum):
    """What may be done about a difference."""

    ALERT = "alert"  # nothing but telling
    RESEND = "resend"  # append the message once more under its id
    DISPATCH = "dispatch"  # make the message that the op was to become
    SYNC_STATUS = "sync_status"  # write into the inbox what is known to be true
    PARK = "park"  # set it aside at the consumer
    RETRY = "retry"  # give a parked message back to the consumer
    CHECK = "check"  # have an undecided half checked


class Tier(enum.StrEnum):
    """How much is read: digests of id ranges first, or every row."""

    AUTO = "auto"
    DIGEST = "digest"
    FULL = "full"


class EngineName(enum.StrEnum):
    """What compares the ranges: threads of this process, or Spark."""

    AUTO = "auto"
    LOCAL = "local"
    SPARK = "spark"


class Range(NamedTuple):
    """Ids from ``first`` up to, but without, ``end``; None is the end of all ids."""

    first: UUID
    end: UUID | None

    def __contains__(self, message_id: object) -> bool:
        return isinstance(message_id, UUID) and self.first <= message_id and (self.end is None or message_id < self.end)


@dataclass(frozen=True, slots=True)
class Effect:
    """The consumer's business table that has one row for each message that took effect.

    ``table`` may be ``schema.table``; ``column`` is of type uuid, holds the message id, and needs an index. Rows of
    messages that the pair knows nothing of are ignored.

    Raises:
        InvalidSettings: a name with anything but letters, digits and underscores in it.
    """

    table: str
    column: str = "message_id"

    def __post_init__(self) -> None:
        for what, name, parts in (("table", self.table, 2), ("column", self.column, 1)):
            if not all(_IDENTIFIER.fullmatch(part) for part in name.split(".", parts - 1)):
                raise InvalidSettings(
                    f"effect {what} {name!r} is not a plain name: letters, digits and _, at most 63"
                    f"{', with its schema before a dot' if parts == 2 else ''}"
                )

    @property
    def quoted(self) -> tuple[str, str]:
        """Table and column as SQL."""
        return ".".join(f'"{part}"' for part in self.table.split(".")), f'"{self.column}"'


@dataclass(frozen=True, slots=True)
class Pair:
    """A topic of the producer and a group of the consumer; ``tags`` and ``keys`` are the filter of its subscription.

    Raises:
        InvalidMessage: topic or group isn't a name.
    """

    topic: str
    group: str
    tags: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    effect: Effect | None = None

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_group(self.group)

    @classmethod
    def of(
        cls,
        topic: str,
        group: str,
        tags: Collection[str] | None = None,
        keys: Collection[str] | None = None,
        effect: Effect | None = None,
    ) -> Pair:
        """Return a pair, from any collections."""
        return cls(
            topic,
            group,
            None if tags is None else frozenset(tags),
            None if keys is None else frozenset(keys),
            effect,
        )

    def __str__(self) -> str:
        return f"{self.topic} → {self.group}"


@dataclass(frozen=True, slots=True)
class Window:
    """Which messages are compared: those whose ids were made from ``since`` up to, but without, ``until``.

    An id begins with the time at which it was made (UUIDv7), the same on both sides, so that windows which follow
    each other miss nothing and take nothing twice, whatever the clocks of the hosts say. Both bounds None means every
    id, also those that aren't UUIDv7. ``grace`` (seconds, by the databases' clocks) is how long a message may be on
    its way before it counts as a difference.

    Raises:
        InvalidSettings: a bound without a time zone, bounds in the wrong order, a negative grace.
    """

    since: dt.datetime | None = None
    until: dt.datetime | None = None
    grace: float = 300.0

    def __post_init__(self) -> None:
        for name, value in (("since", self.since), ("until", self.until)):
            if value is not None and value.tzinfo is None:
                raise InvalidSettings(f"{name} = {value.isoformat()} needs a time zone")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise InvalidSettings(f"since = {self.since.isoformat()} must be before until = {self.until.isoformat()}")
        if self.grace < 0:
            raise InvalidSettings(f"grace = {self.grace!r} must not be negative")

    @property
    def range(self) -> Range:
        """The ids of the window."""
        first = FIRST_ID if self.since is None else _at(self.since)
        return Range(first, None if self.until is None else _at(self.until))

    def __str__(self) -> str:
        since = "the beginning" if self.since is None else self.since.isoformat(" ", "seconds")
        until = "now" if self.until is None else self.until.isoformat(" ", "seconds")
        return f"{since} to {until}"


def _at(moment: dt.datetime) -> UUID:
    # Without version and variant bits: the bound lies before every id of its millisecond. Without floats: it is exact.
    return UUID(int=max((moment - _EPOCH) // _MILLISECOND, 0) << 80)


@dataclass(frozen=True, slots=True)
class Access:
    """A database, and the schema of the outbox tables in it. Its repr shows no password."""

    url: str
    settings: Settings

    def __repr__(self) -> str:
        from sqlalchemy import make_url  # noqa: PLC0415

        # A URL may have a password among its options too, which SQLAlchemy doesn't hide.
        shown = make_url(self.url).difference_update_query(["password", "sslpassword"])
        return f"Access({shown.render_as_string(hide_password=True)!r})"

    @property
    def schema(self) -> str:
        """The schema of the outbox tables."""
        return self.settings.schema


_ID = pa.binary(16)
_TIME = pa.timestamp("us", tz="UTC")

#: One row for each half message of the topic. ``state`` is a `ProducerState`; ``sends`` the newest send number, 0
#: without one, with its ``queue`` and ``position``. ``at`` is since when it is as it is: born, decided, to be
#: delivered, or visible (of the newest send). ``digest`` is that of the body as the producer has it now.
PRODUCER = pa.schema(
    [
        pa.field("id", _ID, nullable=False),
        pa.field("state", pa.int8(), nullable=False),
        pa.field("sends", pa.int16(), nullable=False),
        pa.field("queue", pa.int32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("at", _TIME, nullable=False),
        pa.field("digest", pa.binary(), nullable=False),
        pa.field("addressed", pa.bool_(), nullable=False),
        pa.field("compensated", pa.bool_(), nullable=False),
    ]
)

#: One row for each message that the group's inbox or the business table has. ``status`` is an `InboxState`,
#: ``effects`` the number of rows in the business table, -1 where none is named, ``skipped`` whether the handler
#: answered `Skip`.
CONSUMER = pa.schema(
    [
        pa.field("id", _ID, nullable=False),
        pa.field("status", pa.int8(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("received_at", _TIME),
        pa.field("changed_at", _TIME),
        pa.field("digest", pa.binary()),
        pa.field("effects", pa.int64(), nullable=False),
        pa.field("skipped", pa.bool_(), nullable=False),
    ]
)

#: One row for each difference and each message in flight; ``outcome`` is an `Outcome`. What a side lacks is null.
FINDING = pa.schema(
    [
        pa.field("id", _ID, nullable=False),
        pa.field("outcome", pa.int8(), nullable=False),
        *(pa.field(field.name, field.type) for field in PRODUCER if field.name not in {"id", "digest", "addressed"}),
        pa.field("producer_digest", pa.binary()),
        *(pa.field(field.name, field.type) for field in CONSUMER if field.name not in {"id", "digest", "skipped"}),
        pa.field("consumer_digest", pa.binary()),
    ]
)


def fixed_ids(table: pa.Table) -> np.ndarray[Any, Any]:
    """Return the column ``id`` as an array of 16-byte strings that compare as ids do."""
    column = table["id"].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # what combine_chunks returns for no chunks
        return np.empty(0, "S16")
    buffer = column.buffers()[1]
    return np.frombuffer(buffer, "S16", len(column), column.offset * 16)


def to_uuids(table: pa.Table) -> list[UUID]:
    """Return the column ``id`` as a list."""
    return [UUID(bytes=value) for value in table["id"].to_pylist()]
