"""What a pass of a follower has to tell: one event for each kind of difference, however many messages they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from outbox.reconcile.follow.follower import PassResult
from outbox.reconcile.job import Outcome
from outbox.telemetry.event import TelemetryEvent
from outbox.telemetry.events import DifferencesFound, DifferencesGone, DifferencesRepaired, FollowerRewound

#: So many messages of a kind are named in one event.
NAMED = 100


def events_of(result: PassResult, duty: str, name: str) -> Iterator[TelemetryEvent]:
    """Yield what a pass has to tell."""
    topic, group = result.pair.names
    named: dict[str, Any] = {"duty": duty, "reconciliation": name, "topic": topic, "group": group}
    if result.fell_back:
        yield FollowerRewound(**named)
    found: dict[Outcome, list[UUID]] = {}
    for each in result.found:
        found.setdefault(each.outcome, []).append(each.id)
    more, fewer = unlisted(result)
    for kind in sorted(found.keys() | more.keys()):
        ids = found.get(kind, [])
        yield DifferencesFound(
            **named, kind=kind.label, number=len(ids) + more[kind], message_ids=tuple(ids[:NAMED]), mend=kind.by_hand
        )
    gone: dict[Outcome, list[UUID]] = {}
    for id_, kind in result.gone.items():
        gone.setdefault(kind, []).append(id_)
    for kind in sorted(gone.keys() | fewer.keys()):
        ids = gone.get(kind, [])
        number = len(ids) + fewer[kind]
        yield DifferencesGone(
            **named, kind=kind.label, number=number, message_ids=tuple(ids[:NAMED]), left=result.open[kind]
        )
    if result.repaired:
        results = Counter(each.result for each in result.repaired)
        yield DifferencesRepaired(**named, results=dict(results))


def unlisted(result: PassResult) -> tuple[Counter[Outcome], Counter[Outcome]]:
    """Return how many differences there are more, and fewer, of each kind, besides those that are listed.

    A backlog is told when it begins and when it is over.
    """
    change: Counter[Outcome] = Counter(result.open)
    change.subtract(result.before)
    change.subtract(each.outcome for each in result.found)
    change.update(result.gone.values())
    ahead = Outcome.UNCONSUMED
    if result.before[ahead] and result.open[ahead]:
        del change[ahead]
    return +change, -change
