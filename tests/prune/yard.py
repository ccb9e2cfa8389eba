"""A producer whose messages are in one segment, or in the DEFAULT partitions."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Engine

from outbox import Outbox, Settings
from outbox.message.ids import uuid7_at
from outbox.prune.segments import Segment, empty_segment, make_segment
from tests.dispatch.support import dispatch_all
from tests.kit import Tables

WIDE = Segment(UUID(int=1 << 80), uuid7_at(4e9), "wide")
YOUNG = Settings(queues=2)
OLD = Settings(queues=2, retention=1e-6)
HALF = "INSERT INTO outbox.half_message (id, producer_group, topic, content_type, body) VALUES (:id, 'g', 't', '', '')"
OP = "INSERT INTO outbox.op_message (half_id, resolution, decided_by) VALUES (:id, 'rollback', 'producer')"


class Yard(Tables):
    """A producer with one segment, in which all that it sends is."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.app = Outbox(engine, settings=YOUNG)
        self.connection = engine.connect()
        assert make_segment(self.connection, YOUNG, WIDE)

    def send(self, *keys: str, **options: Any) -> list[UUID]:
        """Send a message for each key, in one transaction, and dispatch."""
        with self.observer.begin() as connection:
            ids = [self.app.send(connection, "t", key, key=key, **options) for key in keys]
        dispatch_all(self.connection, YOUNG)
        return ids

    def prepare(self) -> UUID:
        """Prepare a message."""
        with self.observer.begin() as connection:
            return self.app.prepare(connection, "t", "prepared", key="p")

    def left(self) -> set[UUID]:
        """Return the halves that are there; no op or message is without its half."""
        lone = "SELECT half_id FROM outbox.{} EXCEPT SELECT id FROM outbox.half_message"
        assert [self.rows(lone.format(table)) for table in ("op_message", "message")] == [[], []]
        return set(self.rows("SELECT id FROM outbox.half_message"))

    def empty(self, settings: Settings = OLD, **options: Any) -> int:
        """Empty the segment."""
        return empty_segment(self.connection, settings, WIDE, **options)
