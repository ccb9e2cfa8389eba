"""Followers for tests: their passes are taken by hand, as if the time between them had gone by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, create_engine

from outbox.message.model import Counts
from outbox.reconcile.follow.follower import Follower, PassResult
from outbox.reconcile.job import Job, Outcome, Pair, Window
from tests.reconcile.town import Town, url_of

NAME = "live"


@dataclass
class Watched:
    """A follower of a town, and what it has told."""

    town: Town
    job: Job
    every: float = 20.0
    results: list[PassResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.follower = Follower(self.job, self.job.pairs[0], NAME, self.every, self.results.append)
        self.connection: Connection = (
            create_engine(url_of(self.town.consumer)).connect().execution_options(isolation_level="AUTOCOMMIT")
        )

    def close(self) -> None:
        """Close the connections."""
        self.follower.close()
        self.connection.close()
        self.connection.engine.dispose()

    def pass_(self) -> Counts:
        """Take a pass, which is due, and those that follow it at once."""
        self._change("plan || jsonb_build_object('due_at', clock_timestamp() - interval '1 second')")
        counts = self.follower(self.connection)
        while counts.more:
            counts = self.follower(self.connection)
        return counts

    def later(self) -> None:
        """Have all that is watched, or pending for a time, be due; as if its grace period had gone by."""
        watch = "(SELECT jsonb_object_agg(key, 0) FROM jsonb_each(plan -> 'state' -> 'watch'))"
        self._change(f"jsonb_set(plan, ARRAY['state', 'watch'], coalesce({watch}, jsonb_build_object()))")
        due = "jsonb_set(p, ARRAY['due_at'], to_jsonb(0))"
        pending = f"(SELECT jsonb_agg({due}) FROM jsonb_array_elements(plan -> 'state' -> 'pending') p)"
        self._change(f"jsonb_set(plan, ARRAY['state', 'pending'], coalesce({pending}, jsonb_build_array()))")
        self.follower._forget()

    def _change(self, plan: str) -> None:
        self.town.run(
            f"UPDATE {{s}}.reconciliation_run SET plan = {plan} WHERE finished_at IS NULL AND plan ->> 'follows' <> ''"
        )

    @property
    def found(self) -> dict[UUID, Outcome]:
        """What was told as found, in all passes."""
        return {each.id: each.outcome for result in self.results for each in result.found}

    @property
    def gone(self) -> dict[UUID, Outcome]:
        """What was told as gone, in all passes."""
        return {id_: kind for result in self.results for id_, kind in result.gone.items()}

    @property
    def open(self) -> Counter[Outcome]:
        """How many differences there are by the last pass."""
        return self.results[-1].open


def followed(town: Town, *pairs: Pair, grace: float = 60.0, since: Any = None, **options: Any) -> Job:
    """Return the job of a follower; with ``since`` it begins there."""
    return town.job(*pairs, window=Window(since=since, grace=grace), **options)
