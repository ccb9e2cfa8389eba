"""What the subscriptions of an `Outbox` say of a job: its pairs with their filters, and the databases of both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outbox.errors import InvalidSettings
from outbox.reconcile.model import Access, Pair
from outbox.reconcile.parts import JobParts, access_of
from outbox.reconcile.secret import place

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.app import Outbox
    from outbox.consumer.subscription import Subscription


def parts_of(outbox: Outbox, wanted: JobParts | None = None) -> list[JobParts]:
    """Return what is known of the jobs of an Outbox, one for each database that its groups consume from.

    ``wanted`` overrides it, and its pairs choose among the subscriptions. Of engines only the URL counts.

    Raises:
        InvalidSettings: a pair that is no subscription, or none at all; names those that there are.
    """
    wanted = wanted or JobParts()
    jobs: dict[str, list[Subscription]] = {}
    for subscription in _chosen(outbox, wanted):
        source = _url(outbox.engine if subscription.source is None else subscription.source)
        jobs.setdefault(source, []).append(subscription)
    consumer = Access(_url(outbox.engine), outbox.settings)
    return [
        JobParts(
            producer=Access(source, outbox.settings),
            consumer=consumer,
            pairs=tuple(Pair.of(each.topic, each.group, each.tags, each.keys) for each in subscriptions),
        ).overridden(_narrowed(wanted, subscriptions))
        for source, subscriptions in jobs.items()
    ]


def one_of(jobs: list[JobParts]) -> JobParts:
    """Return the only one of jobs.

    Raises:
        InvalidSettings: there are several; names their databases.
    """
    if len(jobs) > 1:
        places = "; ".join(f"{_pairs(job)} from {place(job.producer.url)}" for job in jobs if job.producer)
        raise InvalidSettings(f"the groups consume from several databases, choose the pairs of one: {places}")
    return jobs[0]


def _chosen(outbox: Outbox, wanted: JobParts) -> list[Subscription]:
    known = outbox.subscriptions
    if not known:
        raise InvalidSettings("the Outbox has no consumers; import the modules that register them")
    if wanted.pairs is None:
        return list(known.values())
    for pair in wanted.pairs:
        if (pair.topic, pair.group) not in known:
            there = ", ".join(f"{topic}:{group}" for topic, group in sorted(known))
            raise InvalidSettings(f"{pair.topic}:{pair.group} is no subscription of the Outbox; it has {there}")
    return [known[pair.topic, pair.group] for pair in wanted.pairs]


def _narrowed(wanted: JobParts, subscriptions: list[Subscription]) -> JobParts:
    """Return what is wanted of these subscriptions."""
    names = {(each.topic, each.group) for each in subscriptions}

    def ours(topic: str, group: str) -> bool:
        return (topic, group) in names

    pairs = None if wanted.pairs is None else tuple(pair for pair in wanted.pairs if ours(pair.topic, pair.group))
    measures = wanted.measures and tuple(each for each in wanted.measures if ours(each.topic, each.group))
    return replace(wanted, pairs=pairs, measures=measures)


def _pairs(job: JobParts) -> str:
    return ", ".join(f"{pair.topic}:{pair.group}" for pair in job.pairs or ())


def _url(bind: Engine | AsyncEngine | str) -> str:
    text = bind if isinstance(bind, str) else bind.url.render_as_string(hide_password=False)
    return access_of(text, what="the URL of a subscription's source").url
