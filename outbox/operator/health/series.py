"""How things stood over time, from the samples of all databases.

What a counter says grows: its rate is the difference of two samples over the time between them. Where a sample is
missing nothing is known; a counter that has gone back (a restore) tells nothing either.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outbox.errors import InvalidRequest
from outbox.operator.model import Series

#: For each window: how long it is, and the step of its values (seconds).
WINDOWS: Mapping[str, tuple[int, int]] = {
    "1h": (3600, 60),
    "6h": (6 * 3600, 300),
    "24h": (24 * 3600, 900),
    "7d": (7 * 24 * 3600, 7200),
}
#: A sample stands for a moment if it was taken so many seconds after it.
_WITHIN = 300
#: The most topics, and groups, that have series of their own: those with the highest values.
_MOST = 12
_WITHOUT_TOTAL = frozenset({"lag"})
_WITHOUT_PARTS = frozenset({"undecided", "failed"})

Values = list[float | None]
#: The producer's database of a topic that a group of another database consumes; None if that isn't known.
SourceOf = Callable[[str, str, str], str | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """How things stood in one database: ``topics`` by name, ``groups`` by topic and name; see `stats`."""

    at: dt.datetime
    topics: Mapping[str, Mapping[str, Any]]
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @classmethod
    def read(cls, text: str | None) -> Sample | None:
        """Return what a row says; None where it says nothing: whoever began it came to no end."""
        told = {} if text is None else json.loads(text)
        if "at" not in told:
            return None
        return cls(dt.datetime.fromisoformat(told["at"]), told["topics"], told["groups"])


#: For each database its samples at the moments that are looked at.
Samples = Mapping[str, Sequence[Sample | None]]


def moments(window: str, now: dt.datetime) -> list[dt.datetime]:
    """Return the moments of a window, and one more before its first, since a rate needs two.

    Raises:
        InvalidRequest: there is no such window.
    """
    if window not in WINDOWS:
        raise InvalidRequest(f"window = {window!r} must be one of {', '.join(WINDOWS)}", "window")
    seconds, step = WINDOWS[window]
    last = int(now.timestamp()) // step * step
    return [dt.datetime.fromtimestamp(last - step * back, dt.UTC) for back in range(seconds // step, -1, -1)]


def within(window: str) -> float:
    """Return how long after a moment (seconds) a sample may be that stands for it."""
    return min(WINDOWS[window][1], _WITHIN)


def series(times: list[dt.datetime], samples: Samples, source_of: SourceOf) -> list[Series]:
    """Return the series of a window; ``times`` has one moment more before them.

    In all: ``throughput``, ``consumed`` (messages a minute), ``backlog``, ``undecided``, ``failed``, ``dead``; of the
    topics and groups with the highest values ``throughput/TOPIC``, ``backlog/TOPIC``, ``consumed/TOPIC/GROUP``,
    ``lag/TOPIC/GROUP`` and ``dead/TOPIC/GROUP``.
    """
    if all(not each or each[-1] is None for each in samples.values()):
        # The sample of this moment is still to be taken.
        times, samples = times[:-1], {name: each[:-1] for name, each in samples.items()}
    known = {name: each for name, each in samples.items() if any(each)}
    of = {
        "throughput": _by_topic(known, lambda each, topic: _rates(each, _topic(each, topic, "messages"))),
        "backlog": _by_topic(known, lambda each, topic: _topic(each, topic, "undispatched")),
        "undecided": _by_topic(known, lambda each, topic: _topic(each, topic, "undecided")),
        "consumed": _by_group(known, lambda name, t, g: _rates(known[name], _group(known[name], t, g, "consumed"))),
        "lag": _by_group(known, lambda name, topic, group: _lag(known, name, topic, group, source_of)),
        "failed": _by_group(known, lambda name, topic, group: _group(known[name], topic, group, "failed")),
        "dead": _by_group(known, lambda name, topic, group: _group(known[name], topic, group, "parked")),
    }
    units = {"throughput": "messages/min", "consumed": "messages/min", "undecided": "halves"}
    nothing: Values = [None] * len(times)
    made = []
    for name, by_database in of.items():
        unit = units.get(name, "messages")
        if name not in _WITHOUT_TOTAL:
            total = _sum(_in_all(parts) for parts in by_database.values() if parts)
            made.append(Series(name, unit, times[1:], (total or nothing)[1:]))
        if name not in _WITHOUT_PARTS:
            parts = {
                part: _sum(each[part] for each in by_database.values() if part in each)
                for part in sorted({part for each in by_database.values() for part in each})
            }
            made += [Series(f"{name}/{part}", unit, times[1:], parts[part][1:]) for part in _highest(parts)]
    return made


def _by_topic(known: Samples, values: Callable[[Sequence[Sample | None], str], Values]) -> dict[str, dict[str, Values]]:
    return {
        name: {topic: values(each, topic) for topic in {topic for sample in each if sample for topic in sample.topics}}
        for name, each in known.items()
    }


def _by_group(known: Samples, values: Callable[[str, str, str], Values]) -> dict[str, dict[str, Values]]:
    return {
        name: {f"{topic}/{group}": values(name, topic, group) for topic, group in _groups(each)}
        for name, each in known.items()
    }


def _groups(samples: Sequence[Sample | None]) -> set[tuple[str, str]]:
    return {(topic, group) for sample in samples if sample for topic, named in sample.groups.items() for group in named}


def _topic(samples: Sequence[Sample | None], topic: str, name: str) -> Values:
    # A topic that wasn't there had no messages.
    return [None if sample is None else sample.topics.get(topic, {}).get(name, 0) for sample in samples]


def _group(samples: Sequence[Sample | None], topic: str, group: str, name: str) -> Values:
    # A group that wasn't there may begin anywhere.
    return [
        None if sample is None or (told := sample.groups.get(topic, {}).get(group)) is None else told.get(name, 0)
        for sample in samples
    ]


def _rates(samples: Sequence[Sample | None], counts: Values) -> Values:
    rates: Values = [None]
    for number in range(1, len(counts)):
        before, after = samples[number - 1], samples[number]
        earlier, later = counts[number - 1], counts[number]
        if before is None or after is None or earlier is None or later is None or later < earlier:
            rates.append(None)
            continue
        minutes = (after.at - before.at).total_seconds() / 60
        rates.append((later - earlier) / minutes if minutes > 0 else None)
    return rates


def _lag(known: Samples, name: str, topic: str, group: str, source_of: SourceOf) -> Values:
    source = source_of(name, topic, group)
    heads = known.get(source) if source else None
    values: Values = []
    for number, sample in enumerate(known[name]):
        told = sample.groups.get(topic, {}).get(group) if sample else None
        head = heads[number] if heads else None
        if told is None:
            values.append(None)
        elif "lag" in told:
            values.append(told["lag"])
        else:
            messages = head.topics.get(topic, {}).get("messages") if head else None
            values.append(None if messages is None else max(messages - told.get("consumed", 0), 0))
    return values


def _sum(found: Iterable[Values]) -> Values:
    """Add up what several databases say of one thing; unknown where one of them doesn't say."""
    return [
        None if None in row else sum(value for value in row if value is not None) for row in zip(*found, strict=True)
    ]


def _in_all(parts: Mapping[str, Values]) -> Values:
    """Add up the topics or groups of a database that are known; unknown where none is."""
    rows = [[value for value in row if value is not None] for row in zip(*parts.values(), strict=True)]
    return [sum(row) if row else None for row in rows]


def _highest(parts: Mapping[str, Values]) -> list[str]:
    """Return the parts with the highest values, in the order of their names."""
    by_height = sorted(parts, key=lambda part: -max((value for value in parts[part] if value is not None), default=0))
    return sorted(by_height[:_MOST])
