"""Flow control: producers of a topic are refused while too much of it waits (RocketMQ: SYSTEM_BUSY).

Waiting messages are counted once a second in a process (for each pool of connections), in a transaction that is about
to commit messages: on its connection, before anything is written. All others go by the last count, which costs them no
I/O, and where that says that the topic is full, a send is refused on the spot. It is counted earlier where the process
has let so many messages through since that the topic may be full: a small limit holds, and one over `_SMALL` is
exceeded by a twentieth rather than counted for each message.

The limits hold approximately all the same: a count doesn't see transactions that are open, nor, until the next one,
what other processes write, and a transaction exceeds them by all that it writes itself; numbers are estimates where
very much waits (`outbox.producer.sql`). That is right for a purpose which wants no lock that all producers share. (To a
SERIALIZABLE transaction a count is a read like any other: once a second, one more reason to be asked to try again.)

Only new messages are refused. A decision never is, be it the producer's, a check's or an operator's: it is what halves
wait for, and a commit that is refused would be a lost one (RocketMQ throttled both alike).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from outbox.database.duty import Duty
from outbox.database.execute import Template, execute
from outbox.errors import OutboxBusy
from outbox.producer import sql
from outbox.telemetry.events import SendRefused
from outbox.telemetry.hooks import Middleware, Registry, emit, work_for

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.pool import Pool

    from outbox.settings import Settings

#: How long (seconds) a count is believed.
INTERVAL = 1.0
#: One that took its time is believed so many times longer than it took, up to LONGEST (seconds): counting must not
#: become the load.
PATIENCE = 20.0
LONGEST = 10.0

#: A limit is small up to here. Of a larger one, a count is of use for this part at least.
_SMALL = 20

#: A message that is to be written: its topic, and whether it is only prepared.
Arrival = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class _Limit:
    """One of the limits; ``of_prepared``: messages that are sent at once don't count, and aren't refused."""

    value: int
    setting: str
    what: str
    of_prepared: bool
    count: Template


@dataclass(slots=True)
class _Gauge:
    """The last count in one database, and how long that is believed (by `time.monotonic`).

    ``waiting`` has the topics with `least` messages, ``let`` how many were let through since.
    """

    limit: _Limit
    middlewares: Registry[Middleware]
    waiting: Mapping[str, int] = field(default_factory=dict)
    let: Counter[str] = field(default_factory=Counter)
    until: float = 0.0

    @property
    def least(self) -> int:
        """Topics with fewer waiting messages aren't read: those that are half empty, if a limit is large."""
        return 1 if self.limit.value <= _SMALL else self.limit.value // 2

    def of(self, arrivals: Iterable[Arrival]) -> Counter[str]:
        """Return how many messages of each topic add to the limited number."""
        return Counter(topic for topic, prepared in arrivals if prepared is self.limit.of_prepared)

    def is_due(self, topics: Iterable[str], now: float) -> bool:
        """Tell whether the count is old, or one of the topics may be full by the messages let through since."""
        limit, unread = self.limit.value, self.least - 1
        return now >= self.until or any(
            self.let[each] >= max(limit - self.waiting.get(each, unread), limit // _SMALL, 1) for each in topics
        )

    def refuse(self, arrivals: Iterable[Arrival]) -> None:
        """Raise for the first message of a full topic."""
        for topic, prepared in arrivals:
            waiting = self.waiting.get(topic, 0)
            if waiting >= self.limit.value and (prepared or not self.limit.of_prepared):
                limit = self.limit
                with work_for(self.middlewares):
                    emit(SendRefused(topic=topic, waiting=waiting, setting=limit.setting, limit=limit.value))
                raise OutboxBusy(topic, limit.what, waiting, limit.value, limit.setting)


class FlowControl:
    """The limits of one `Outbox`, and how full its topics are, for each database by the pool of connections to it."""

    def __init__(self, settings: Settings, middlewares: Registry[Middleware]) -> None:
        undecided, undispatched = settings.max_undecided, settings.max_undispatched
        limits = (
            _Limit(undecided, "max_undecided", "undecided halves", True, sql.undecided),
            _Limit(undispatched, "max_undispatched", "undispatched messages", False, sql.undispatched),
        )
        self._schema = settings.schema
        self._middlewares = middlewares
        self._limits = [limit for limit in limits if limit.value]
        self._gauges: WeakKeyDictionary[Pool, list[_Gauge]] = WeakKeyDictionary()

    def refuse_now(self, pool: Pool, topic: str, *, prepared: bool) -> None:
        """Refuse a message without I/O, if the topic is known to be full.

        Raises:
            OutboxBusy: it is.
        """
        now = time.monotonic()
        for gauge in self._gauges.get(pool, ()):
            if now < gauge.until:
                gauge.refuse([(topic, prepared)])

    def admit(self, connection: Connection, arrivals: Collection[Arrival]) -> None:
        """Count the waiting messages if that is due, and let messages be written by the caller's transaction, or not.

        Raises:
            OutboxBusy: one of the topics is full.
        """
        prepares = any(prepared for _, prepared in arrivals)
        new = [_Gauge(limit, self._middlewares) for limit in self._limits]
        gauges = self._gauges.setdefault(connection.engine.pool, new)
        concerned = [gauge for gauge in gauges if prepares or not gauge.limit.of_prepared]
        now = time.monotonic()
        if due := [gauge for gauge in concerned if gauge.is_due(gauge.of(arrivals), now)]:
            self._count(connection, due, now)
        for gauge in concerned:
            gauge.refuse(arrivals)
        for gauge in concerned:
            gauge.let += gauge.of(arrivals)

    def _count(self, connection: Connection, gauges: list[_Gauge], now: float) -> None:
        for gauge in gauges:
            # One thread counts; others go by the last count meanwhile.
            gauge.until = now + INTERVAL
        counted_from = [gauge.let.copy() for gauge in gauges]
        counts = (
            each.limit.count(self._schema, least=each.least, limit=each.limit.value, **sql.SAMPLE) for each in gauges
        )
        plan = sql.plan_by_index_until_back(self._schema, seconds=INTERVAL)
        try:
            planned, *counted, _ = execute(connection, plan, *counts, sql.PLAN_BACK)
        except BaseException:
            for gauge in gauges:
                gauge.until = 0.0
            raise
        *_, sees_the_present = planned[0]
        ended = time.monotonic()
        until = ended + max(INTERVAL, min(PATIENCE * (ended - now), LONGEST)) if sees_the_present else 0.0
        for gauge, rows, let in zip(gauges, counted, counted_from, strict=True):
            gauge.waiting = dict(rows) if sees_the_present else {}
            gauge.let -= let
            gauge.until = until


DUTIES = (
    Duty(
        "flow control",
        "Counts what waits in a topic, and refuses more.",
        """
        producer: producer
        SELECT ON op_message dispatch_cursor
        SELECT(id topic) ON half_message
        SELECT(topic next_check_at parked_at) ON half_check
        SELECT(half_id position) ON message
        SELECT(half_id deliver_at) ON scheduled_message
        """,
    ),
)
