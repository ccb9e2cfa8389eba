"""What the handlers of a group do: how often, how long, with what result, and how far behind the group is.

A consuming thread only adds to the totals of its `HandlerMeter`. A worker reports the sums of the last minutes
(`HandlerReport`), and the operator adds up what all workers report.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datetime as dt

#: So many seconds are reported, and of the last of them once more alone.
WINDOW, MINUTE = 300.0, 60.0
#: The upper ends (seconds) of the buckets of times, each a quarter above the one before: from 0.1 ms to more than an
#: hour. Longer ones are in one more.
BOUNDS: Sequence[float] = tuple(0.0001 * 1.25**number for number in range(80))


@dataclass(slots=True, eq=False)
class HandlerMeter:
    """Totals of one consuming thread, which only grow. That thread writes them, without a lock; others may read.

    ``calls`` of the handler are counted by the bucket of their time, messages when their transaction has committed
    (``done``), attempts when their failure has been written down (``failed``). ``in_flight`` is how many messages the
    handler has right now. ``lag`` is how many messages the group has not come to, ``waiting_since`` when the first of
    them came into its queue, as of the last look, which was at the monotonic time ``measured_at``; all None before it.
    """

    done: int = 0
    failed: int = 0
    calls: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    in_flight: int = 0
    lag: int | None = None
    waiting_since: dt.datetime | None = None
    measured_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Totals:
    at: float
    done: int
    failed: int
    calls: tuple[int, ...]

    def since(self, earlier: _Totals) -> dict[str, Any]:
        """Return what has happened since: in how many ``seconds``, and how many ``done``, ``failed``, ``calls``."""
        calls = map(operator.sub, self.calls, earlier.calls)
        return {
            "seconds": round(self.at - earlier.at, 3),
            "done": self.done - earlier.done,
            "failed": self.failed - earlier.failed,
            "calls": {str(bucket): number for bucket, number in enumerate(calls) if number},
        }


class HandlerReport:
    """What a worker reports of one handler, by the meters of the threads that call it, for each of its sources."""

    def __init__(self, topic: str, group: str, by_source: Sequence[Sequence[HandlerMeter]]) -> None:
        self._names = {"topic": topic, "group": group}
        self._by_source = by_source
        self._meters = [meter for meters in by_source for meter in meters]
        self._earlier: deque[_Totals] = deque([self._totals(time.monotonic())])

    def facts(self) -> dict[str, Any]:
        """Return what happened within the window, as JSON can hold it; to be called every few seconds.

        ``seconds`` is the time that the numbers are of; ``calls`` are by bucket, without those that have none, and
        ``minute`` has the same four of the last minute: times of several workers can be added up by bucket, their
        percentiles can't. ``lag`` and ``waiting_since`` are what those threads saw that have looked last, one at each
        source, the first of them ``looked`` seconds ago.
        """
        return self.facts_at(time.monotonic())

    def facts_at(self, now: float) -> dict[str, Any]:
        """Return `facts` of a monotonic time."""
        totals, earlier = self._totals(now), self._earlier
        while len(earlier) > 1 and earlier[1].at <= now - WINDOW:
            earlier.popleft()
        minute_ago = next((each for each in reversed(earlier) if each.at <= now - MINUTE), earlier[0])
        found = {**totals.since(earlier[0]), "minute": totals.since(minute_ago)}
        earlier.append(totals)
        last = [max(meters, key=lambda meter: meter.measured_at or 0.0) for meters in self._by_source]
        lags = [meter.lag for meter in last if meter.lag is not None]
        looks = [meter.measured_at for meter in last if meter.measured_at is not None]
        since_all = min((each.waiting_since for each in last if each.waiting_since is not None), default=None)
        return {
            **self._names,
            **found,
            "in_flight": sum(meter.in_flight for meter in self._meters),
            "looked": round(now - min(looks), 3) if len(looks) == len(last) else None,
            "lag": sum(lags) if len(lags) == len(last) else None,
            "waiting_since": None if since_all is None else since_all.isoformat(),
        }

    def _totals(self, now: float) -> _Totals:
        done, failed = sum(meter.done for meter in self._meters), sum(meter.failed for meter in self._meters)
        calls = zip(*(meter.calls for meter in self._meters), strict=True)
        return _Totals(now, done, failed, tuple(map(sum, calls)))


def percentile(calls: Mapping[str, int], share: float) -> float | None:
    """Return the time (seconds) within which ``share`` (a fraction) of calls by bucket ended; None if there were none.

    It is read off inside its bucket in proportion, so that it is off by a quarter at most.
    """
    rank = share * sum(calls.values())
    for bucket, number in sorted((int(bucket), number) for bucket, number in calls.items()):
        if number >= rank:
            upper = BOUNDS[min(bucket, len(BOUNDS) - 1)]
            lower = BOUNDS[bucket - 1] if bucket else 0.0
            return lower + (upper - lower) * rank / number
        rank -= number
    return None
