"""The numbers over time, from the samples of all databases.

A counter only grows: its rate is the difference of two samples over the time between them. Where a sample is missing
the rate isn't known; nor is it where a counter has gone back (a restore).
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outbox.errors import InvalidRequest

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


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time, for a chart: one for each of ``times``, None where nothing is known."""

    name: str
    unit: str
    times: list[dt.datetime]
    values: list[float | None]


#: The producer's database of a topic that a group of another database consumes; None if that isn't known.
SourceOf = Callable[[str, str, str], str | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers of one database at one moment: ``topics`` by name, ``groups`` by topic and name; see `as_sample`."""

    at: dt.datetime
    topics: Mapping[str, Mapping[str, Any]]
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @classmethod
    def read(cls, text: str | None) -> Sample | None:
        """Return the sample of a row; None where it is empty: the worker that began it did not finish it."""
        stored = {} if text is None else json.loads(text)
        if "at" not in stored:
            return None
        return cls(dt.datetime.fromisoformat(stored["at"]), stored["topics"], stored["groups"])


#: For each database its samples at the moments of a window.
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
    by_name = {
        "throughput": _by_topic(known, lambda each, topic: _rates(each, _topic(each, topic, "messages"))),
        "backlog": _by_topic(known, lambda each, topic: _topic(each, topic, "undispatched")),
        "undecided": _by_topic(known, lambda each, topic: _topic(each, topic, "undecided")),
        "consumed": _by_group(known, lambda name, t, g: _rates(known[name], _group(known[name], t, g, "consumed"))),
        "lag": _by_group(known, lambda name, topic, group: lag(known, name, topic, group, source_of)),
        "failed": _by_group(known, lambda name, topic, group: _group(known[name], topic, group, "failed")),
        "dead": _by_group(known, lambda name, topic, group: _group(known[name], topic, group, "parked")),
    }
    units = {"throughput": "messages/min", "consumed": "messages/min", "undecided": "halves"}
    nothing: Values = [None] * len(times)
    found: list[Series] = []
    for name, by_database in by_name.items():
        unit = units.get(name, "messages")
        if name not in _WITHOUT_TOTAL:
            total = _sum(_in_all(parts) for parts in by_database.values() if parts)
            found.append(Series(name, unit, times[1:], (total or nothing)[1:]))
        if name not in _WITHOUT_PARTS:
            parts = {
                part: _sum(each[part] for each in by_database.values() if part in each)
                for part in sorted({part for each in by_database.values() for part in each})
            }
            found += [Series(f"{name}/{part}", unit, times[1:], parts[part][1:]) for part in _highest(parts)]
    return found


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
        None if sample is None or (of := sample.groups.get(topic, {}).get(group)) is None else of.get(name, 0)
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


def lag(known: Samples, name: str, topic: str, group: str, source_of: SourceOf) -> Values:
    """Return the lag of a group in the samples of a database, with those of its topic's producer."""
    source = source_of(name, topic, group)
    heads = known.get(source) if source else None
    values: Values = []
    for number, sample in enumerate(known[name]):
        sampled = sample.groups.get(topic, {}).get(group) if sample else None
        head = heads[number] if heads else None
        if sampled is None:
            values.append(None)
        elif "lag" in sampled:
            values.append(sampled["lag"])
        else:
            messages = head.topics.get(topic, {}).get("messages") if head else None
            values.append(None if messages is None else max(messages - sampled.get("consumed", 0), 0))
    return values


def _sum(found: Iterable[Values]) -> Values:
    """Add up the values of several databases; unknown where one of them is."""
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
