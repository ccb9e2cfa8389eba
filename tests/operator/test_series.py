"""Charts from samples: rates, gaps, restarts, lags over the border of a database."""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import replace
from typing import Any

import pytest

from outbox.errors import InvalidRequest
from outbox.operator.health.stats import (
    WINDOWS,
    OverTime,
    RecentDecisions,
    Samples,
    Stats,
    StatsSample,
    TopicStats,
    Values,
    moments,
    recent_decisions,
    series,
    totals,
)

NOON = dt.datetime(2026, 1, 1, 12, 0, tzinfo=dt.UTC)


def taken(
    *messages: int | None, group: str | None = None, seconds: int = 0, topic: str = "paid", **also: Any
) -> list[StatsSample | None]:
    """Return samples, a minute apart; of a group's offsets if one is named. None is a gap."""
    samples: list[StatsSample | None] = []
    for minute, count in enumerate(messages):
        at = NOON + dt.timedelta(minutes=minute, seconds=seconds)
        if count is None:
            samples.append(None)
        elif group is None:
            samples.append(StatsSample(at, {topic: {"messages": count} | also}, {}, {}))
        else:
            samples.append(StatsSample(at, {}, {topic: {group: {"consumed": count} | also}}, {}))
    return samples


def summed(samples: OverTime) -> OverTime:
    """Return samples with the totals that the worker keeps with them, one after the other."""
    before: dict[str, Any] | None = None
    found: list[StatsSample | None] = []
    for each in samples:
        if each is None:
            found.append(None)
        else:
            whole = {"at": each.at, "topics": each.topics, "groups": each.groups}
            in_all = totals(whole, before)
            before = whole | {"totals": in_all}
            found.append(replace(each, totals=in_all))
    return found


def made(samples: Samples, source: str | None = None) -> dict[str, Values]:
    """Return the values of the series by name."""
    count = len(next(iter(samples.values())))
    times = [NOON + dt.timedelta(minutes=minute) for minute in range(count)]
    found = series(times, {name: summed(each) for name, each in samples.items()}, lambda *_: source)
    assert all(len(each.values) == len(each.times) for each in found)
    return {each.name: each.values for each in found}


def test_a_rate_is_the_difference_of_two_samples() -> None:
    """Messages a minute come from counts that only grow, and from when they were really counted."""
    assert made({"a": taken(100, 160, 160, 280)})["throughput/paid"] == [60, 0, 120]
    late = taken(100, 190)
    late[1] = StatsSample(NOON + dt.timedelta(seconds=90), {"paid": {"messages": 190}}, {}, {})
    assert made({"a": late})["throughput"] == [60]


def test_a_gap_is_unknown_and_makes_no_peak() -> None:
    """What was sent while no worker took samples belongs to no minute; neither does that of the first sample after."""
    values = made({"a": taken(100, 160, None, 5000, 5060)})
    assert values["throughput"] == values["throughput/paid"] == [60, None, None, 60]


def test_a_counter_that_goes_back_tells_nothing() -> None:
    """After a restore a count is lower than before: that is no negative rate."""
    assert made({"a": taken(100, 5, 15)})["throughput"] == [None, 10]


def test_what_goes_back_and_on_between_two_moments() -> None:
    """A longer step doesn't see each sample: the sums tell that it isn't known what came in it."""
    samples = summed(taken(1000, 0, 1500, 1560))
    times = [NOON, NOON + dt.timedelta(minutes=2), NOON + dt.timedelta(minutes=3)]
    found = {each.name: each.values for each in series(times, {"a": [samples[0], *samples[2:]]}, lambda *_: None)}
    assert found["throughput"] == found["throughput/paid"] == [None, 60]


def test_what_a_group_was_moved_over_is_not_consumed() -> None:
    """An operator that has a group skip a backlog makes no rate of it, and neither does one that moves it back."""
    moved = taken(10, 20, group="mail")
    moved += taken(1020, 1030, group="mail", moves=1)
    moved += taken(500, 2030, group="mail", moves=2)
    samples = [each and replace(each, at=NOON + dt.timedelta(minutes=n)) for n, each in enumerate(moved)]
    values = made({"a": samples})
    assert values["consumed"] == values["consumed/paid/mail"] == [10, None, 10, None, 1530]


def test_what_is_new_or_deleted_makes_no_peak_in_all() -> None:
    """A group that begins at the end of its topic, and one that is deleted, change no sum of what was consumed."""
    groups = [{"mail": 10}, {"mail": 14, "new": 1_000_000}, {"mail": 15, "new": 1_000_002}, {"new": 1_000_003}]
    samples = [
        StatsSample(at, {}, {"paid": {name: {"consumed": count} for name, count in each.items()}}, {})
        for at, each in zip((each.at for each in taken(0, 0, 0, 0) if each), groups, strict=True)
    ]
    assert made({"a": samples})["consumed"] == [4, 3, 1]


def test_a_new_topic_begins_at_nothing_and_a_new_group_anywhere() -> None:
    """The first messages of a topic are its throughput; a group may begin at the end."""
    topic = [StatsSample(NOON, {}, {}, {}), *taken(None, 30)[1:]]
    assert made({"a": topic})["throughput/paid"] == [30]
    group = [StatsSample(NOON, {}, {}, {}), *taken(None, 1_000_000, 1_000_010, group="mail")[1:]]
    assert made({"a": group})["consumed/paid/mail"] == [None, 10]


def test_databases_are_added_up() -> None:
    """A topic of two databases is one; where one of them has a gap, the sum isn't known."""
    values = made({"a": taken(0, 10, 20), "b": taken(0, 1, None), "no sample": [None, None, None]})
    assert values["throughput/paid"] == values["throughput"] == [11, None]


def test_of_some_databases_nothing_is_known_in_all() -> None:
    """Where one can't be read now, its samples can't be either: what the others had then isn't all there was."""
    times = [NOON + dt.timedelta(minutes=minute) for minute in range(3)]
    samples = {"a": summed(taken(0, 10, 20))}
    found = {each.name: each.values for each in series(times, samples, lambda *_: None, whole=False)}
    assert (found["throughput"], found["throughput/paid"]) == ([None, None], [10, 10])


def test_a_lag_over_the_border_of_a_database() -> None:
    """Heads come from the producer's samples and offsets from the consumer's; a sampled lag stays."""
    samples = {"a": taken(10, 20, None, 30), "b": taken(5, 20, 25, 31, group="mail")}
    assert made(samples, source="a")["lag/paid/mail"] == [0, None, 0]
    assert made(samples)["lag/paid/mail"] == [None, None, None]
    assert made({"b": taken(5, 6, group="mail", lag=7)})["lag/paid/mail"] == [7]


def test_states_are_as_they_were() -> None:
    """Backlog, failed and parked messages are no rates."""
    values = made({"a": taken(1, 1, undispatched=3, undecided=2), "b": taken(1, 1, group="mail", failed=4, parked=5)})
    assert [values[name] for name in ("backlog", "undecided", "failed", "dead", "dead/paid/mail")] == [
        [3], [2], [4], [5], [5],
    ]  # fmt: skip


def test_without_samples_nothing_is_known() -> None:
    """Every chart has its times, and no values."""
    values = made({"a": [None, None, None]})
    assert values["throughput"] == [None]  # the last minute is still to be sampled
    assert "throughput/paid" not in values


def test_the_last_moment_waits_for_its_sample() -> None:
    """The minute that has just begun isn't shown as a gap before anybody could sample it."""
    assert made({"a": taken(0, 10, 20, None)})["throughput"] == [10, 10]


def test_only_the_highest_have_series_of_their_own() -> None:
    """A hundred topics don't make a hundred lines; all of them count in the sum."""
    later = {f"topic-{n:03}": {"messages": n} for n in range(100)}
    first = StatsSample(NOON, {key: {} for key in later}, {}, {})
    values = made({"a": [first, StatsSample(NOON + dt.timedelta(minutes=1), later, {}, {})]})
    own = [name for name in values if name.startswith("throughput/")]
    assert own == [f"throughput/topic-{n:03}" for n in range(88, 100)]
    assert values["throughput"] == [sum(range(100))]


@pytest.mark.parametrize("window", WINDOWS)
def test_moments_of_a_window(window: str) -> None:
    """They are even, end at the last full step, and there is one more than values are shown."""
    seconds, step = WINDOWS[window]
    found = moments(window, NOON + dt.timedelta(seconds=59))
    assert len(found) == seconds // step + 1
    assert {(b - a).total_seconds() for a, b in itertools.pairwise(found)} == {step}
    assert found[-1] == NOON
    with pytest.raises(InvalidRequest, match="window"):
        moments("2y", NOON)


def test_a_sample_that_says_nothing() -> None:
    """One that was begun and not ended, or couldn't be taken, is a gap."""
    assert StatsSample.read(None) is StatsSample.read("{}") is StatsSample.read('{"error": "canceled"}') is None


def test_decisions_are_rates_and_what_came_in_a_window() -> None:
    """What was committed, rolled back and checked: a minute in the charts, and as a number since the first sample."""
    samples = taken(0, 0, committed=4, rolled_back=1, checks=9)
    later = {"paid": {"committed": 10, "rolled_back": 1, "checks": 12}}
    samples[1] = StatsSample(NOON + dt.timedelta(minutes=2), later, {}, {})
    values = made({"a": samples})
    assert (values["committed"], values["rolled_back"], values["checks"]) == ([3], [0], [1.5])
    at = NOON + dt.timedelta(minutes=5)
    topic = TopicStats("paid", committed=30, rolled_back=2, checks=12)
    assert recent_decisions(Stats(at, [topic], []), samples[0]) == {"paid": RecentDecisions(300, 26, 1, 3)}


def test_decisions_of_a_window_that_are_not_known() -> None:
    """Without a sample, and where a number has gone back, since the database was restored."""
    now = Stats(NOON + dt.timedelta(minutes=5), [TopicStats("paid", committed=3)], [])
    assert recent_decisions(now, None) == {}
    assert recent_decisions(now, taken(0, committed=4)[0]) == {}
