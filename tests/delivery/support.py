"""What the tests of deliveries share: bank A, which sends and asks; bank B, which consumes; and the passes between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from outbox import Delivery, Message, Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.delivery.confirm_pass import confirm_once
from outbox.message.model import Counts
from tests.compensate.support import CLEAN, LEDGER
from tests.kit import Tables, consume_all
from tests.kit.bench import Bench

#: What a producer knows of its messages: deliveries; without one, the cursor of a group that has come past a message.
KNOWN = """
SELECT half_id, consumer_group, number, status, settled FROM outbox.delivery
 UNION ALL
SELECT DISTINCT m.half_id, consumer_group, 1, 'consumed', true
  FROM (SELECT DISTINCT ON (topic, consumer_group) * FROM outbox.delivery_cursor
         ORDER BY topic, consumer_group, number DESC) g JOIN outbox.message m USING (topic)
 WHERE m.position > coalesce(starts[queue + 1], 0) AND m.position <= coalesce(positions[queue + 1], 0)
   AND NOT EXISTS (SELECT FROM outbox.delivery d WHERE (d.half_id, d.consumer_group) = (m.half_id, g.consumer_group))
"""
TOLD = "CREATE TABLE IF NOT EXISTS told (n serial PRIMARY KEY, message_id uuid, consumer_group text, status text)"


def refuse(message: Message, session: Session) -> None:
    """Fail, as bank B does for an account that isn't there."""
    raise ValueError("no such account")


def tell(delivery: Delivery, session: Session) -> None:
    """Write down what bank A is told; the same may be told twice."""
    session.connection().exec_driver_sql(
        "INSERT INTO told (message_id, consumer_group, status) VALUES (%s, %s, %s)",
        (delivery.message.id, delivery.group, delivery.status.value),
    )


class Post(Bench):
    """Bank A knows group ``g`` of topic ``t`` at bank B; messages have no grace unless a test gives them one."""

    def __init__(self, producer: Engine, consumer: Engine, settings: Settings) -> None:
        super().__init__(producer, consumer, replace(settings, confirm_grace=0.0))
        self.at_a = Tables(producer)
        for engine in {producer, consumer}:
            with engine.begin() as connection:
                connection.exec_driver_sql(CLEAN)
                connection.exec_driver_sql(f"DROP TABLE IF EXISTS ledger, told; {LEDGER}; {TOLD}")
        self.knowing = self.know()

    def know(self, *groups: str, **options: Any) -> Outbox:
        """Return bank A as it knows groups of topic ``t`` at bank B, by default ``g``."""
        app = Outbox(self.producer, settings=self.settings)
        for group in groups or ("g",):
            app.known_group("t", group=group, **({"consumer": self.consumer} | options))
        return app

    def confirm(self, app: Outbox | None = None, settings: Settings | None = None, **options: Any) -> Counts:
        """Make one pass, as a worker does, and have callbacks called; return the counts of the pass."""
        with self.producer.connect() as connection:
            counts = self.confirm_on(connection, app, settings, **options)
        self.call(app)
        return counts

    def confirm_without_calls(self, app: Outbox) -> Counts:
        """Make one pass, and have no callback called."""
        with self.producer.connect() as connection:
            return self.confirm_on(connection, app)

    def call(self, app: Outbox | None = None) -> None:
        """Have bank A's callbacks called of what it was told, also of what they have failed at."""
        self.dispatch()
        age = "UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '2 s' WHERE status = 'failed'"
        with self.producer.connect() as connection:
            for subscription in (app or self.knowing).subscriptions.values():
                if subscription.about is not None:
                    consumer = Consumer(subscription, self.settings)
                    consumer.start(connection, connection)
                    consume_all(consumer, connection, connection)
                    self.at_a.run(f"{age} AND topic = :topic", topic=subscription.topic)
                    consumer.retry_once(connection, connection)

    def confirm_on(
        self, connection: Connection, app: Outbox | None = None, settings: Settings | None = None, **options: Any
    ) -> Counts:
        """Make one pass on a connection."""
        app = app or self.knowing
        return confirm_once(
            connection,
            settings or self.settings,
            groups=app.groups_to_confirm(),
            callbacks=app.delivery_callbacks,
            compensations=app.compensations,
            **options,
        )

    def with_resends(self, most: int) -> Settings:
        """Return the settings with another number of resends."""
        return replace(self.settings, confirm_resends=most)

    def with_compression(self, above: int) -> Settings:
        """Return the settings by which larger bodies are stored compressed."""
        return replace(self.settings, compress_above=above)

    # --- what happens -----------------------------------------------------------------------------------------------

    def lose(self, *ids: UUID, group: str = "g") -> None:
        """Have a group's inbox forget messages that it has read past."""
        sql = "DELETE FROM outbox.consumer_message WHERE consumer_group = :g AND message_id = ANY (:ids)"
        self.run(sql, g=group, ids=list(ids))

    def age_sends(self, seconds: float) -> None:
        """Make all sends older."""
        self.at_a.run(
            "UPDATE outbox.message SET visible_at = visible_at - make_interval(secs => :seconds)", seconds=seconds
        )

    # --- looks ------------------------------------------------------------------------------------------------------

    def fates(self, group: str = "g") -> Mapping[UUID, list[str]]:
        """Return the statuses of each message in the order in which they became known."""
        sql = f"SELECT half_id, status FROM ({KNOWN}) d WHERE consumer_group = :group ORDER BY number"
        found: dict[UUID, list[str]] = {}
        for half_id, status in self.at_a.rows(sql, group=group):
            found.setdefault(half_id, []).append(status)
        return found

    def settled(self, half_id: UUID, group: str = "g") -> bool:
        """Tell whether nobody asks about a message any more."""
        sql = f"""SELECT settled FROM ({KNOWN}) d WHERE half_id = :id AND consumer_group = :group
                  ORDER BY number DESC LIMIT 1"""
        return bool(self.at_a.value(sql, id=half_id, group=group))

    def sends(self, half_id: UUID) -> int:
        """Count how often a message was sent."""
        return int(self.at_a.value("SELECT count(*) FROM outbox.message WHERE half_id = :id", id=half_id))

    def told(self) -> list[tuple[UUID, str | None, str]]:
        """Return what bank A was told, in order."""
        return [tuple(row) for row in self.at_a.rows("SELECT message_id, consumer_group, status FROM told ORDER BY n")]
