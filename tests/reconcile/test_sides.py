"""How a side is read: the producer's tables one by one say what their join says, and many ids take one connection."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pytest

from outbox.operator.operator import Operator
from outbox.reconcile import source
from outbox.reconcile.job import FIRST_ID, Outcome, Pair, Range, Tier, Window
from outbox.reconcile.source import PostgresSide, ProducerSide
from outbox.reconcile.tables import InboxState, ProducerState, Torn
from tests.reconcile.town import HOUR, PAIR, WITH_EFFECT, Fate, Town, fate, kinds


def odd(dice: random.Random) -> Fate:
    """Return a message in any state, more often than not one that was sent once."""
    if dice.random() < 0.4:
        return fate(tag=dice.choice(["mine", "other"]))
    state = dice.choice(list(ProducerState))
    torn = dice.choice(list(Torn)) if state is ProducerState.DISPATCHED and dice.random() < 0.2 else Torn.NO
    more: dict[str, Any] = {"tag": dice.choice([None, "mine"]), "due_in": dice.choice([HOUR, -HOUR])}
    more |= {"sends": dice.randint(1, 3), "compensated": dice.random() < 0.2}
    return fate(state=state, status=InboxState.NONE, torn=torn, **more)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pair", [PAIR, Pair("t", "g", tags=["mine"])])
def test_tables_say_what_their_join_says(town: Town, seed: int, pair: Pair) -> None:
    """Of rows in any state, of two topics, also where what is scheduled is a message already, or was rolled back."""
    dice = random.Random(seed)  # noqa: S311
    ids = town.plant([odd(dice) for _ in range(120)])
    town.plant([odd(dice) for _ in range(60)], topic="other", group="h")
    town.at_producer(
        "INSERT INTO outbox.scheduled_message (half_id, deliver_at)"
        " SELECT id, now() FROM outbox.half_message WHERE id = ANY (:ids) ON CONFLICT DO NOTHING",
        ids=ids[::7],
    )
    cut = sorted(ids)[40], sorted(ids)[80]
    access = town.job().producer
    for ranges in ([Range(FIRST_ID, None)], [Range(FIRST_ID, cut[0]), Range(cut[1], None)]):
        by_table = ProducerSide(access, "producer", pair).read(ranges)
        assert by_table.to_pylist() == PostgresSide(access, "producer", pair).read(ranges).to_pylist()


def test_many_ids_take_one_connection(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do many small ranges: each side is asked once for what differs here and there."""
    ids = sorted(town.plant_bulk(2_000))
    opened: list[Any] = []
    connect = source.adbc_connection

    def count(address: str) -> Any:
        opened.append(address)
        return connect(address)

    monkeypatch.setattr(source, "adbc_connection", count)
    for side in (
        ProducerSide(town.job().producer, "producer", PAIR),
        PostgresSide(town.job().consumer, "consumer", PAIR),
    ):
        for ranges in (
            [Range.only(id_) for id_ in ids],
            [Range(id_, ids[at * 20 + 10]) for at, id_ in enumerate(ids[::20])],
        ):
            opened.clear()
            side.read(ranges)
            assert len(opened) == 1


@pytest.mark.parametrize("again", [False, True])
def test_what_a_group_reads_again_is_looked_at_again(
    town: Town, again: bool, small_buckets: Callable[[Sequence[UUID]], None]
) -> None:
    """A reset has what was settled handled once more, which is seen by the next run; also if a run comes in between."""
    consumer = town.declare()
    ids = town.send(*range(40))
    town.dispatch()
    town.consume(consumer)
    small_buckets(sorted(ids)[10::10])
    window = Window(grace=0.0)
    assert town.reconcile(WITH_EFFECT, tier=Tier.DIGEST, window=window).in_sync
    Operator.open({"a": town.producer, "b": town.consumer}, town.settings).reset_group(
        "g", "t", "first", by="me", why="again"
    )
    if again:
        town.reconcile(WITH_EFFECT, tier=Tier.DIGEST, window=window)
    town.consume(consumer)
    found = kinds(town.reconcile(WITH_EFFECT, tier=Tier.DIGEST, window=window))
    assert found == dict.fromkeys(ids, Outcome.DUPLICATE_EFFECT)
