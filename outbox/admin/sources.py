"""Where the topics of groups come from: their lag over the border of a database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outbox.report import place

if TYPE_CHECKING:
    from outbox.admin.overview import Seen


class Sources:
    """Where the topics of groups come from, as far as the registered databases tell."""

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._seen = {each.name: each for each in seen}
        self._producers: dict[str, list[str]] = defaultdict(list)
        for each in seen:
            for topic in each.stats.topics:
                self._producers[topic.topic].append(each.name)

    def of(self, database: str, topic: str, group: str) -> str | None:
        """Return the name of the producer's database of a topic that is consumed in ``database``; None if unknown."""
        producers = self._producers.get(topic, [])
        if database in producers:
            return database
        if len(producers) < 2:
            return producers[0] if producers else None
        told = {
            handler.options.get("source")
            for handler in self._seen[database].handlers
            if handler.kind == "consumer" and (handler.topic, handler.group) == (topic, group)
        }
        fitting = [name for name in producers if place(self._seen[name].database.engine.url) in told]
        return fitting[0] if len(fitting) == 1 else None

    def lag(self, database: str, topic: str, group: str, consumed: int) -> int | None:
        """Return how many messages of another database's topic a group has not come to."""
        source = self.of(database, topic, group)
        if source is None:
            return None
        messages = next(each.messages for each in self._seen[source].stats.topics if each.topic == topic)
        return max(messages - consumed, 0)

    def recent_lags(self, database: str, topic: str, group: str) -> list[int]:
        """Return the lag of a group in the samples of the last minutes, as far as it is known."""
        source = self._seen.get(self.of(database, topic, group) or "")
        lags = []
        for number, sample in enumerate(self._seen[database].recent):
            told: Any = sample.groups.get(topic, {}).get(group) if sample else None
            head = source.recent[number] if source else None
            if told is None:
                continue
            if "lag" in told:
                lags.append(told["lag"])
            elif head is not None:
                lags.append(max(head.topics.get(topic, {}).get("messages", 0) - told.get("consumed", 0), 0))
        return lags
