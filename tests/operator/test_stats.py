"""The numbers of groups: in the statistics, in the sample of a minute, and as gauges."""

from __future__ import annotations

import dataclasses
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from outbox.console.api.probes import exposition
from outbox.operator.health.stats import GroupStats, SagaStats, Stats, TopicStats, as_sample, stats
from outbox.telemetry.prometheus import OF_GROUPS, OF_SAGAS, OF_TOPICS, GaugeOfStats
from tests.console.web import Shop
from tests.operator.health import overview_of, sql, this_minute

#: Something that is neither zero nor unknown, of each type that a number has.
NUMBERS = {bool: True, int: 7, float: 2.5, UUID: UUID(int=1), str: "x", list: ["x"]}


def full(kind: type[Any], **known: Any) -> Any:
    """Return a row of which each number is known, and none is zero."""
    empty = {field.name: getattr(kind(**known), field.name) for field in dataclasses.fields(kind)}
    given = {name: NUMBERS.get(type(value), 7) for name, value in empty.items() if name not in known}
    return kind(**known, **given)


@pytest.mark.parametrize(("part", "gauges"), [("topics", OF_TOPICS), ("groups", OF_GROUPS), ("sagas", OF_SAGAS)])
def test_each_gauge_of_a_sample_is_in_it(engine: Engine, part: str, gauges: tuple[GaugeOfStats, ...]) -> None:
    """A worker serves the gauges of the last sample: what that leaves out would be zero for ever."""
    rows = full(TopicStats, topic="t"), full(GroupStats, group="g", topic="t"), full(SagaStats, saga="s")
    sample: Any = as_sample(Stats(this_minute(engine), *([row] for row in rows)))
    numbers = {"topics": sample["topics"]["t"], "groups": sample["groups"]["t"]["g"], "sagas": sample["sagas"]["s"]}
    assert {each.field for each in gauges if each.sampled} <= numbers[part].keys()


def test_a_group_that_is_held_back(engine: Engine) -> None:
    """Paused by an operator, or stopped by its breaker: each as long as it lasts."""
    shop = Shop(engine)
    shop.orders(1)
    shop.drain()

    def shown() -> tuple[bool, bool]:
        with engine.connect() as connection:
            (group,) = stats(connection, shop.outbox.settings, ["producer", "consumer"]).groups
        lines = exposition(overview_of(shop=engine)).decode().splitlines()
        labels = f'{{database="shop",group="{group.group}",topic="{group.topic}"}}'
        assert f"outbox_group_paused{labels} {float(group.paused)}" in lines
        assert f"outbox_breaker_open{labels} {float(group.breaker_open)}" in lines
        return group.paused, group.breaker_open

    assert shown() == (False, False)
    with engine.connect() as connection:
        (group,) = stats(connection, shop.outbox.settings, ["consumer"]).groups
    shop.outbox.operator.pause_group(group.group, by="ann", why="the provider moves")
    assert shown() == (True, False)
    sql(engine, "UPDATE outbox.group_control SET opened_at = now(), trial_at = now(), opened_because = 'down'")
    assert shown() == (True, True)
    shop.outbox.operator.resume_group(group.group, by="ann")
    sql(engine, "UPDATE outbox.group_control SET opened_at = NULL, trial_at = NULL, opened_because = NULL")
    assert shown() == (False, False)
