"""Describe the job of a reconciliation: two databases, the pairs to compare, how, and the repair of differences.

This module needs no library of the extra: applications and commands describe a job with it, and `run` runs it.
The fields of `Job`, `Window` and `Spark` are what a file, a command and a mapping in code can say (`config`).
"""

from __future__ import annotations

import datetime as dt
import enum
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import quote, quote_plus
from uuid import UUID

from sqlalchemy import Engine, make_url

from outbox.database.engines import connect_url
from outbox.errors import InvalidSettings
from outbox.message.content import check_group, check_topic
from outbox.reader import Reader, Seconds, option
from outbox.reconcile.measure import Measure
from outbox.reconcile.tables import NAMES, OF_FOREIGN, ForeignTable, wrong_columns
from outbox.settings import Settings

#: The first and the last of all ids.
FIRST_ID, LAST_ID = UUID(int=0), UUID(int=2**128 - 1)

#: How often (seconds) a reconciliation looks that follows the log, and how long another may take, unless it is told.
PASS_EVERY, MAX_TIME = 20.0, 6 * 3600.0

_EPOCH, _MILLISECOND = dt.datetime.fromtimestamp(0, dt.UTC), dt.timedelta(milliseconds=1)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)


class Repair(enum.StrEnum):
    """What may be done about a difference, and what that does to the message."""

    does: str

    def __new__(cls, value: str, does: str = "") -> Repair:
        """Make a member."""
        member = str.__new__(cls, value)
        member._value_, member.does = value, does
        return member

    ALERT = "alert", "only reports it"
    RESEND = "resend", "sends it once more under its id"
    DISPATCH = "dispatch", "dispatches it"
    SYNC_STATUS = "sync_status", "writes what is known to be true into the inbox"
    PARK = "park", "sets it aside at the consumer"
    RETRY = "retry", "gives it back to the consumer"
    CHECK = "check", "has it checked"
    SYNC_OPINION = "sync_opinion", "writes what the consumer says into the producer's table"


#: What came of a repair: it was done, or nothing was left to do. All else is why it was refused.
DONE, HEALED = "done", "healed"


class Outcome(enum.IntEnum):
    """What comparing the two sides of one message comes to, what that means, and what can be done about it.

    The number travels in Arrow tables. Up to `UNJUDGED` nothing is wrong, and the message is only counted. From
    `TORN` on it is a difference; of several that fit one message the first in this order is its
    kind. The first of its ``repairs`` is done unless a policy says otherwise.
    """

    meaning: str
    repairs: tuple[Repair, ...]

    def __new__(cls, number: int, meaning: str = "", *repairs: Repair) -> Outcome:
        """Make a member."""
        member = int.__new__(cls, number)
        member._value_, member.meaning, member.repairs = number, meaning, repairs
        return member

    CONSUMED = 0, "committed, dispatched and consumed"
    ROLLED_BACK = 1, "rolled back or recalled, and without effect; or compensated, and quarantined"
    LEFT_OUT = 2, "the group's filter leaves it out, or it was sent before the group began"
    IN_FLIGHT = 3, "on its way, or known to the consumer alone, for less than the grace period; or scheduled for later"
    UNJUDGED = 4, "only the consumer has it, and the producer may have pruned it"

    # The gravest: what its rows at the producer say can't be relied on.
    TORN = 10, "its rows at the producer contradict each other: something else than the outbox wrote them", Repair.ALERT
    CONSUMED_THOUGH_ROLLED_BACK = 11, "it took effect, though it was rolled back, recalled or compensated", Repair.ALERT
    DUPLICATE_EFFECT = 12, "it took effect more than once: in one business table, or in several databases", Repair.ALERT
    LOST = 13, "the consumer has read it, and the producer has lost it since: its log went back", Repair.ALERT
    # Or it was never decided, or isn't due yet.
    PHANTOM = 14, "the consumer has it, and the producer never sent it", Repair.ALERT, Repair.PARK
    DIGEST_MISMATCH = (
        15, "the body that the producer has isn't the one that the consumer handled", Repair.ALERT, Repair.PARK
    )  # fmt: skip
    NO_EFFECT = 16, "the inbox says consumed, and the business table has no row of it", Repair.ALERT
    UNRECORDED = 17, "it took effect, and the inbox has no row of it", Repair.SYNC_STATUS, Repair.ALERT
    # The producer or the business table contradicts it; which of them is right is known.
    STATUS_MISMATCH = 18, "the inbox contradicts what is known to be true", Repair.SYNC_STATUS, Repair.ALERT
    UNCOMPENSATED = (
        19, "quarantined at the consumer, and the producer's transaction was never compensated", Repair.ALERT
    )  # fmt: skip
    # Its outcome would depend on how long ago that is.
    AHEAD_OF_CLOCK = 20, "its time is later than its database's clock, by more than the grace period", Repair.ALERT
    UNDISPATCHED = 21, "committed, and never made a message", Repair.DISPATCH, Repair.ALERT  # or scheduled, and overdue
    RESEND_EXHAUSTED = 22, "the consumer doesn't know it, though it was resent as often as is allowed", Repair.ALERT
    MISSING = 23, "the consumer has read past it, and doesn't know it", Repair.RESEND, Repair.ALERT
    UNCONSUMED = 24, "the consumer hasn't come so far, for longer than the grace period", Repair.ALERT
    # Told before what the consumer says itself, of which a reader of the producer's table doesn't know.
    OPINION_DIFFERS = (
        25, "the producer holds it for something else than the consumer says, for longer than the grace period",
        Repair.ALERT, Repair.SYNC_OPINION,
    )  # fmt: skip
    PARKED = 26, "set aside by the consumer, which won't try it again by itself", Repair.ALERT, Repair.RETRY
    FAILED = 27, "the consumer's handler failed at it", Repair.ALERT, Repair.PARK
    UNDECIDED = 28, "neither committed nor rolled back, for longer than the grace period", Repair.ALERT, Repair.CHECK

    @property
    def label(self) -> str:
        """The name that people see: ``digest_mismatch``."""
        return self.name.lower()

    @property
    def differs(self) -> bool:
        """Is it a difference?"""
        return self >= Outcome.TORN

    def repair(self, policy: Mapping[Outcome, Repair], foreign: Collection[Part] = ()) -> Repair:
        """Return what is done about it under a policy; where the tables of a side are ``foreign``, that is little."""
        action = policy.get(self, self.repairs[0])
        is_known = "producer" in foreign if action is Repair.SYNC_OPINION else not foreign
        return action if is_known else Repair.ALERT

    def by_hand(self, foreign: Collection[str] = ()) -> str:
        """Return what a human does about it; of sides whose tables are ``foreign`` our commands know nothing."""
        part, of_foreign = OF_FOREIGN.get(self.label, ("", ""))
        return of_foreign if part in foreign else _BY_HAND[self]

    def mend(self, policy: Mapping[Outcome, Repair], foreign: Collection[Part] = (), *, writable: bool = False) -> str:
        """Return what mends it under a policy: an action with ``--apply``, or what a human does.

        ``writable`` tells whether an opinion can be written into the producer's table.
        """
        action = self.repair(policy, foreign)
        if action is not Repair.ALERT:
            return f"--apply {action.does} ({self.label} = {action.value})"
        others = (
            repair
            for repair in self.repairs
            if repair is not Repair.ALERT and (writable if repair is Repair.SYNC_OPINION else not foreign)
        )
        return "; ".join(
            [self.by_hand(foreign), *(f"the policy {self.label} = {each.value} {each.does}" for each in others)]
        )


_BY_HAND: Mapping[Outcome, str] = {
    Outcome.TORN: "find out what writes or deletes rows of half_message, op_message and message behind the outbox; "
    "put back from a backup what is gone, then reconcile again",
    Outcome.CONSUMED_THOUGH_ROLLED_BACK: "undo its effect at the consumer, or do at the producer what was rolled back; "
    "`outbox messages show ID` tells its story",
    Outcome.DUPLICATE_EFFECT: "undo all of its effects but one, and see that the handler writes with its session",
    Outcome.LOST: "undo its effect at the consumer, or do at the producer once more what it has forgotten",
    Outcome.PHANTOM: "see that both databases are the right ones and neither was restored to an earlier time; "
    "then undo its effect at the consumer",
    Outcome.DIGEST_MISMATCH: "find out what changed the body, and correct its effect at the consumer",
    Outcome.NO_EFFECT: "make up for its effect at the consumer, or find out what took it away",
    Outcome.UNRECORDED: "write its inbox row, lest it takes effect once more",
    Outcome.STATUS_MISMATCH: "correct the inbox row; `outbox messages show ID` tells its story",
    Outcome.UNCOMPENSATED: "undo the producer's transaction: the consumer will never take this message",
    Outcome.AHEAD_OF_CLOCK: "see that the times of a table that isn't ours are in UTC or have a time zone, and that no "
    "server's clock was set back",
    Outcome.UNDISPATCHED: "see that a worker of the producer runs; `outbox doctor` says what holds it up",
    Outcome.RESEND_EXHAUSTED: "find out why the consumer doesn't keep it; then allow more with max_resends",
    Outcome.MISSING: "send it once more: `outbox messages resend ID`",
    Outcome.UNCONSUMED: "see that a worker of the group runs and keeps up; `outbox stats` shows its lag",
    Outcome.OPINION_DIFFERS: "see that the producer asks the consumer what became of it, and keeps the answer",
    Outcome.PARKED: "mend its cause, which `outbox messages show ID` tells; then give it back: `outbox dead retry ID`",
    Outcome.FAILED: "nothing while it is retried; `outbox messages show ID` tells its last error",
    Outcome.UNDECIDED: "see that a worker with a checker for the topic runs; `outbox half commit ID` or "
    "`outbox half rollback ID` decides by hand",
}

#: The differences, gravest first; and by their labels.
KINDS: tuple[Outcome, ...] = tuple(outcome for outcome in Outcome if outcome.differs)
LABELED: Mapping[str, Outcome] = {kind.label: kind for kind in KINDS}


def counts_as_json(counts: Mapping[Outcome, int]) -> dict[str, int]:
    """Return counts by the labels of outcomes, without those that are 0."""
    return {outcome.label: number for outcome, number in sorted(counts.items()) if number}


def counts_of_json(counts: Mapping[str, int]) -> Counter[Outcome]:
    """Return what `counts_as_json` returned."""
    return Counter({Outcome[label.upper()]: number for label, number in counts.items()})


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


#: One side of a pair.
Part = Literal["producer", "consumer"]


class Range(NamedTuple):
    """Ids from ``first`` up to, but without, ``end``; None is the end of all ids."""

    first: UUID
    end: UUID | None

    @classmethod
    def only(cls, id_: UUID) -> Range:
        """Return the range of one id."""
        return cls(id_, None if id_ == LAST_ID else UUID(int=id_.int + 1))

    @property
    def last(self) -> UUID:
        """The last id that it can hold."""
        return LAST_ID if self.end is None else UUID(int=self.end.int - 1)

    def __contains__(self, message_id: object) -> bool:
        return isinstance(message_id, UUID) and self.first <= message_id and (self.end is None or message_id < self.end)

    def clipped(self, within: Range) -> Range | None:
        """Return the part of it that lies within another; None if there is none."""
        first = max(self.first, within.first)
        end = min((end for end in (self.end, within.end) if end is not None), default=None)
        return Range(first, end) if end is None or first < end else None


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

    @classmethod
    def parse(cls, text: object) -> Effect:
        """Return the effect that ``table.column`` or ``schema.table.column`` names, or a table of both.

        Raises:
            ValueError: it names none; says how it is written.
        """
        if isinstance(text, Mapping):
            return Reader().read(cls, text, "effect")
        table, dot, column = text.rpartition(".") if isinstance(text, str) else ("", "", "")
        try:
            return cls(table, column) if dot else cls(column)
        except InvalidSettings as error:
            raise ValueError(f"table.column or schema.table.column: {error}") from None


@dataclass(frozen=True, slots=True)
class Pair:
    """A topic of the producer and a group of the consumer; ``tags``, ``keys`` and ``headers`` are the
    filter of its subscription.

    Raises:
        InvalidMessage: topic or group isn't a name.
        InvalidSettings: one of ``headers`` has no value.
    """

    topic: str
    group: str
    tags: Collection[str] | None = option(None, "The group takes only these tags.")
    keys: Collection[str] | None = option(None, "The group takes only these keys; * stands for any characters.")
    effect: Effect | None = option(
        None,
        "The consumer's table with one row for each message, and its column.",
        parse=Effect.parse,
        metavar="TABLE.COLUMN",
    )
    headers: Collection[str] | None = option(
        None, "The group takes only messages with one of these values of each header, as name=value."
    )
    feed: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_group(self.group)
        object.__setattr__(self, "feed", self.topic)
        if wrong := [text for text in self.headers or () if "=" not in text]:
            raise InvalidSettings(f"{self}: a filter on headers names their values: {wrong[0]!r} must be 'name=value'")
        for name, texts in (("tags", self.tags), ("keys", self.keys), ("headers", self.headers)):
            if texts is not None:
                object.__setattr__(self, name, frozenset(texts))

    @property
    def names(self) -> tuple[str, str]:
        """Topic and group."""
        return self.topic, self.group

    def from_feed(self, feed: str) -> Pair:
        """Return it with the feed that the group has of this producer's topic."""
        object.__setattr__(pair := replace(self), "feed", feed)
        return pair

    def __str__(self) -> str:
        return f"{self.feed} → {self.group}"


@dataclass(frozen=True, slots=True)
class Window:
    """Select the messages to compare: those whose ids were made from ``since`` up to, but without, ``until``.

    An id begins with the time at which it was made (UUIDv7), the same on both sides, so that windows which follow
    each other miss nothing and take nothing twice, whatever the clocks of the hosts say. Both bounds None means every
    id, also those that aren't UUIDv7. ``last`` stands in place of ``since`` until the job begins (`ending`).

    Raises:
        InvalidSettings: a bound without a time zone, bounds in the wrong order, a negative grace.
    """

    since: dt.datetime | None = option(None, "Messages not older. Default: all there are.", metavar="TIME")
    until: dt.datetime | None = option(None, "Messages that are older. Default: now.", metavar="TIME")
    grace: Seconds = option(
        300.0, "How long a message may be on its way before it counts as a difference.", metavar="DURATION"
    )
    last: Seconds | None = option(None, "Messages of so long before the end, in place of since.", metavar="DURATION")

    def __post_init__(self) -> None:
        Reader().check(self)
        if self.since is not None and self.last is not None:
            raise InvalidSettings("since and last exclude each other; give one")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise InvalidSettings(f"since = {self.since.isoformat()} must be before until = {self.until.isoformat()}")

    def ending(self, clock: Callable[[], dt.datetime]) -> Window:
        """Return the window with ``since`` in place of ``last``; ``clock`` is asked where it has no end."""
        if self.last is None:
            return self
        return replace(self, since=(self.until or clock()) - dt.timedelta(seconds=self.last), last=None)

    @property
    def range(self) -> Range:
        """The ids of the window."""
        first = FIRST_ID if self.since is None else _at(self.since)
        return Range(first, None if self.until is None else _at(self.until))

    @property
    def unbounded(self) -> bool:
        """Are all messages in it?"""
        return self.since is None and self.until is None and self.last is None

    def __str__(self) -> str:
        since = "the beginning" if self.since is None else self.since.isoformat(" ", "seconds")
        until = "now" if self.until is None else self.until.isoformat(" ", "seconds")
        return f"{since} to {until}"


def id_at(milliseconds: int) -> UUID:
    """Return the bound before the ids of a time, in milliseconds since 1970: it has no version and variant bits."""
    return UUID(int=max(milliseconds, 0) << 80)


def _at(moment: dt.datetime) -> UUID:
    # Without floats: it is exact.
    return id_at((moment - _EPOCH) // _MILLISECOND)


@dataclass(frozen=True, slots=True)
class Access:
    """A database, and the schema of the outbox tables in it. Its repr shows no password.

    Of an ``engine`` the connections are made as it makes its own. In another process there is only a URL, with what the
    engine had to connect by when the value was sent.
    """

    url: str
    settings: Settings
    engine: Engine | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        # A URL may have a password among its options too, which SQLAlchemy doesn't hide.
        shown = make_url(self.url).difference_update_query(["password", "sslpassword"])
        return f"Access({shown.render_as_string(hide_password=True)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        now = self.resolved()
        return Access, (now.url, now.settings)

    def resolved(self) -> Access:
        """Return the access by a URL that a program which has no engine connects by now.

        Raises:
            InvalidSettings: the engine opens its connections in a way that no URL can say.
        """
        if self.engine is None:
            return self
        return Access(connect_url(self.engine).render_as_string(hide_password=False), self.settings)

    @property
    def schema(self) -> str:
        """The schema of the outbox tables."""
        return self.settings.schema


#: Stands for the database of a side that has none: what Spark reads it from is said by its `ForeignTable`.
NO_DATABASE = Access("postgresql+psycopg://", Settings())


def described(url: str) -> str:
    """Return which database is meant, in words without a secret."""
    parts = make_url(url)
    return f"database {parts.database!r} on {parts.host or 'the local socket'}"


def hidden(text: str, url: str) -> str:
    """Return a text without the password of a URL, in whatever way it is written there."""
    parts = make_url(url)
    secrets = (parts.password, parts.query.get("password"), parts.query.get("sslpassword"))
    forms = {form for secret in secrets if secret for form in _written(str(secret))}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text


def _written(secret: str) -> tuple[str, ...]:
    """Return a secret as it is, as URLs have it (SQLAlchemy's leave spaces), and as libpq's own strings have it."""
    quoted = (quote(secret), quote(secret, safe=""), quote(secret, safe=" +"), quote_plus(secret))
    return secret, *quoted, secret.replace("\\", "\\\\").replace("'", "\\'")


@dataclass(frozen=True, slots=True)
class Spark:
    """How Spark runs: ``conf`` are settings of its session, ``spark.master`` among them."""

    conf: Mapping[str, str] = option(help="Goes to the session as it is.", factory=dict, secret=True)
    max_wait: Seconds = option(600.0, "How long Spark may take to run a first task.", above=0, metavar="DURATION")


@dataclass(frozen=True, slots=True)
class Job:
    """A reconciliation: two databases, the pairs to compare, and how.

    ``policy`` says what is done about kinds of differences; a kind that it doesn't name has the first of its repairs.
    Without ``apply`` nothing is written but the record, into ``record_in`` where the consumer is a standby; the
    consumer's tables must be there too, though they may be empty.

    ``producer_table`` and ``consumer_table`` stand in for the outbox's own tables of a side. Such a side is reported
    on, and not repaired, but for the producer's opinion; where it is the consumer's, the run is recorded in
    ``record_in``, or nowhere.

    Raises:
        InvalidSettings: no pair, the same pair twice, a number that makes no sense, a repair that can't mend its
            kind, or something that can't be done with tables that aren't ours; names the mend.
    """

    producer: Access
    consumer: Access
    pairs: tuple[Pair, ...] = option(help="Topics and groups to compare.", aliases=("pair",), metavar="TOPIC:GROUP")
    window: Window = option(help="Which messages are compared.", factory=Window)
    tier: Tier = option(Tier.AUTO, "digest: read only ranges whose digests differ; full: every row.")
    engine: EngineName = option(EngineName.AUTO, "local: threads of this process; spark: a cluster.")
    measures: tuple[Measure, ...] = option((), "What the business tables must agree on.", aliases=("measure",))
    policy: Mapping[Outcome, Repair] = option(
        help="What is done about each kind of difference.", factory=dict, metavar="KIND=REPAIR"
    )
    max_resends: int = option(3, "How often a missing message is resent at most.", least=0, metavar="N")
    # Each kind of difference has its share, so that none is left out as a whole.
    max_findings: int = option(
        100_000,
        "How many differences of a pair are listed, written down and repaired at most; all are counted.",
        least=len(KINDS),
        metavar="N",
    )
    apply: bool = option(False, "Repair what differs, by the policy.")
    record: bool = option(True, "Write runs, findings and what was in sync into the consumer's database.")
    record_in: Access | None = option(None, "Write them into this database instead.")
    keep_for: Seconds = option(
        7 * 86400.0, "How long a range that was in sync is trusted; 0 trusts none.", metavar="DURATION"
    )
    max_time: Seconds = option(
        MAX_TIME, "How long the comparison may take, and the repair.", above=0, most=20 * 86400.0, metavar="DURATION"
    )
    workers: int = option(2, "Ranges compared at once.", least=1, metavar="N")
    actor: str = option("reconcile", "The actor of repairs, in the audit.")
    spark: Spark = option(help="Where and how Spark runs.", factory=Spark)
    producer_table: ForeignTable | None = option(None, "What the producer has in place of our tables.")
    consumer_table: ForeignTable | None = option(None, "What the consumer has in place of our tables.")

    def __post_init__(self) -> None:
        Reader().check(self)
        if not self.pairs:
            raise InvalidSettings("nothing to reconcile: name a topic and a group")
        if len({pair.names for pair in self.pairs}) < len(self.pairs):
            raise InvalidSettings("a topic and group is named twice")
        for kind, repair in self.policy.items():
            if not kind.differs:
                raise InvalidSettings(f"{kind.label} is no difference: there is nothing to do about it")
            if repair not in kind.repairs:
                choices = ", ".join(kind.repairs)
                raise InvalidSettings(f"{repair.value!r} can't mend {kind.label}; choose one of {choices}")
        for wrong in (*(_wrong_tables(self) if self.tables else ()), *_wrong_sync(self)):
            raise InvalidSettings(wrong)

    @property
    def tables(self) -> dict[Part, ForeignTable]:
        """The sides whose tables aren't ours."""
        both: dict[Part, ForeignTable | None] = {"producer": self.producer_table, "consumer": self.consumer_table}
        return {part: table for part, table in both.items() if table is not None}

    @property
    def by_spark(self) -> dict[Part, ForeignTable]:
        """Those of them that Spark alone can read: they have no database."""
        return {part: table for part, table in self.tables.items() if table.by_spark}

    @property
    def databases(self) -> dict[Part, Access]:
        """The databases of the sides that have one."""
        both: dict[Part, Access] = {"producer": self.producer, "consumer": self.consumer}
        return {part: access for part, access in both.items() if part not in self.by_spark}

    @property
    def labels(self) -> tuple[str, str]:
        """What producer and consumer are, for people."""
        spark = self.by_spark
        producer = spark.get("producer") or described(self.producer.url)
        return str(producer), str(spark.get("consumer") or described(self.consumer.url))

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """The topic, as its group keeps it, and the group of each pair."""
        return tuple((pair.feed, pair.group) for pair in self.pairs)

    def from_feeds(self, feeds: Mapping[str, str]) -> Job:
        """Return it with the feeds, by topic, that the groups have of this producer's topics."""
        return replace(self, pairs=tuple(pair.from_feed(feeds.get(pair.topic, pair.topic)) for pair in self.pairs))

    @property
    def recorder(self) -> Access:
        """The database that has the record."""
        return self.record_in or self.consumer

    @property
    def accesses(self) -> tuple[Access, ...]:
        """All databases that it speaks to."""
        return self.producer, self.consumer, self.recorder


def _wrong_tables(job: Job) -> Iterator[str]:
    """Say what of a job can't be done, since the tables of a side aren't ours."""
    yield from _wrong_mappings(job)
    yield from _only_of_ours(job)
    yield from _wrong_ways(job)


def _wrong_sync(job: Job) -> Iterator[str]:
    """Say why the consumer's word can't be written into the producer's table, where the policy wants that."""
    if job.policy.get(Outcome.OPINION_DIFFERS) is not Repair.SYNC_OPINION:
        return
    if (table := job.producer_table) is None:
        yield (
            "policy.opinion_differs = 'sync_opinion' is for a producer's table that isn't ours; the outbox's own are "
            "told by the duty confirm; leave it out"
        )
    elif why := table.unwritable:
        yield f"producer.tables ({table}): {why}"
    elif job.apply and job.consumer_table and not (job.record and job.record_in):
        yield (
            "apply: what is written into the producer's table is audited where the run is recorded; name a database "
            "for the record (--record, OUTBOX_RECORD_URL, [record] in a file, [job.record] in a fleet's)"
        )


def _wrong_mappings(job: Job) -> Iterator[str]:
    for part, table in job.tables.items():
        if wrong := wrong_columns(part, table):
            yield f"{part}.tables ({table}): {wrong}"
        needed = [name for name in NAMES[part] if len({getattr(pair, name) for pair in job.pairs}) > 1]
        if missing := [name for name in needed if name not in table.columns]:
            yield (
                f"{part}.tables ({table}): nothing tells the rows of several pairs apart; name the {missing[0]} among "
                "the columns, or compare one pair"
            )


def _only_of_ours(job: Job) -> Iterator[str]:
    foreign = " and ".join(job.tables)
    if job.apply and Repair.SYNC_OPINION not in job.policy.values():
        yield (
            f"apply: nothing can be repaired in tables that aren't ours (those of the {foreign}) but what the producer "
            "believes, by the policy opinion_differs = sync_opinion; leave it out"
        )
    if job.measures:
        yield f"measure: measures are computed between the outbox's own tables, and those of the {foreign} aren't ours"
    if len(job.tables) == 2 and not job.window.unbounded:
        yield (
            "a window is one of ids that begin with a time, and the ids of two foreign tables needn't; leave since, "
            "until and last out, and bound the tables by queries"
        )
    for pair in job.pairs:
        if "producer" in job.tables and (pair.tags or pair.keys or pair.headers):
            yield f"{pair}: tags, keys and headers filter the outbox's own tables; map the column addressed instead"
        if "consumer" in job.tables and pair.effect is not None:
            yield f"{pair}: an effect is counted beside our inbox; map the column effects instead"


def _wrong_ways(job: Job) -> Iterator[str]:
    if job.by_spark and job.engine == "local":
        yield f"the engine local can't read {' and '.join(map(str, job.by_spark.values()))}; leave it out"
    if job.by_spark and job.tier == "digest":
        yield "the tier digest needs two databases that digest; leave it out"


class Progress(Protocol):
    """What hears how a job goes on: a progress bar, a log, nothing. Called from the job's own thread."""

    def stage(self, title: str, total: int | None) -> None:
        """A stage begins; ``total`` is how many steps it has, None if that isn't known."""

    def done(self, steps: int) -> None:
        """So many steps of the stage are done."""

    def say(self, sentence: str) -> None:
        """Something was decided."""


class Interrupted(Exception):
    """Raised by a `Progress` to end the job; what was done is in the record, and a job may be run again."""


class NoProgress:
    """Hears nothing."""

    def stage(self, title: str, total: int | None) -> None:
        """Do nothing."""

    def done(self, steps: int) -> None:
        """Do nothing."""

    def say(self, sentence: str) -> None:
        """Do nothing."""


class Stoppable(NoProgress):
    """Ends a job at its next step, once an event is set."""

    def __init__(self, stopping: Event) -> None:
        self._stopping = stopping

    def stage(self, title: str, total: int | None) -> None:  # noqa: ARG002 - any stage is a step
        """A stage begins."""
        self.done(0)

    def done(self, steps: int) -> None:  # noqa: ARG002 - as many as they are
        """Steps are done."""
        if self._stopping.is_set():
            raise Interrupted
