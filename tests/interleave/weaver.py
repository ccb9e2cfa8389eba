"""A world and an explorer on one database: explores meetings of flows there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outbox.database import migration
from outbox.embedded import ServerLike
from tests.interleave.explore import Act, Explorer, Found
from tests.interleave.flows import Meeting
from tests.interleave.oracle import judge
from tests.interleave.stepping import without_pipelines
from tests.interleave.world import World, seed


class Weaver:
    """A world and an explorer on a database of their own."""

    def __init__(self, url: str, flows: int = 3) -> None:
        self.world = World(url)
        self.explorer = Explorer(url, flows)
        for engine in self.explorer.engines:
            self.world.app_on(engine)

    def close(self) -> None:
        """Close all connections."""
        self.explorer.close()
        self.world.close()

    def explore(self, meeting: Meeting, *, kills: bool, schedules: int, hurts: int) -> Found:
        """Explore one meeting."""
        seed(self.world, meeting.stages, *meeting.orders)
        self.world.bind()
        acts = [flow.act(self.world) for flow in meeting.flows]

        def begin() -> Sequence[Act]:
            self.world.reset()
            return acts

        return self.explorer.explore(
            begin, lambda outcomes: judge(self.world, meeting, outcomes), kills=kills, schedules=schedules, hurts=hurts
        )


@contextmanager
def weaver(server: ServerLike, flows: int = 3) -> Iterator[Weaver]:
    """Make a migrated database on a server, and a weaver on it for so many flows."""
    name = f"weave_{os.getpid()}"
    server.create_database(name)
    migration.upgrade(server.url(name))
    one = Weaver(server.url(name), flows)
    try:
        with without_pipelines():
            yield one
    finally:
        one.close()
        server.drop_database(name)
