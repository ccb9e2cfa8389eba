"""A follower agrees with the plain query of `test_oracle`, whatever both sides say and whatever happens in between."""

from __future__ import annotations

import datetime as dt
import random
from uuid import UUID

from hypothesis import HealthCheck, Phase, given, settings
from sqlalchemy import text

from outbox.reconcile.job import Outcome, Pair
from tests.kit import tries
from tests.reconcile.following import Watched, followed
from tests.reconcile.test_oracle import STEPS, World, empty, oracle, worlds
from tests.reconcile.town import HOUR, Town, ids_at


def differences(town: Town, pair: Pair) -> dict[UUID, Outcome]:
    """Return all that differs but for the backlog, which is told by its number."""
    return {id_: kind for id_, kind in oracle(town, pair).items() if kind.differs and kind is not Outcome.UNCONSUMED}


def listed(town: Town) -> dict[UUID, Outcome]:
    """Return the findings that are open."""
    sql = "SELECT message_id, kind FROM outbox.reconciliation_finding WHERE result IS NULL"
    with town.consumer.connect() as connection:
        return {id_: Outcome[kind.upper()] for id_, kind in connection.execute(text(sql))}


@settings(
    max_examples=tries(2),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(world=worlds)
def test_it_agrees_with_one_plain_query(village: Town, world: World) -> None:
    """After each few steps of time: what is open is what the query says, and nothing else was told."""
    town, chance = village, random.Random(world.seed)  # noqa: S311 - no secret
    empty(town)
    town.run("TRUNCATE {s}.reconciliation_run, {s}.reconciliation_finding")
    ids = ids_at(HOUR, len(world.rows))
    town.plant(world.rows, ids=ids)
    since = dt.datetime.now(dt.UTC) - dt.timedelta(hours=2)
    watched = Watched(town, followed(town, world.pair, since=since))
    try:
        for steps in (0, 4, 4):
            for step in chance.choices(STEPS, k=steps):
                step(town, chance, ids)
            watched.pass_()
            watched.later()
            watched.pass_()
            assert listed(town) == differences(town, world.pair)
        assert watched.found.keys() - watched.gone.keys() <= differences(town, world.pair).keys()
    finally:
        watched.close()
