"""Words on leases find their rows by the key, however many messages are taken: no index of all of them is walked."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox.consumer.leased import sql
from outbox.database.execute import driver_of

_TAKEN = """
INSERT INTO outbox.consumer_message
       (consumer_group, message_id, topic, queue, position, status, attempts, next_attempt_at, lease, taken_by)
SELECT 'mail', gen_random_uuid(), 'orders', 0, n, 'taken', 0, clock_timestamp() + interval '1 hour', n, 'client'
  FROM generate_series(1, 3000) n
"""
#: What the statements bind beside the leases that are named.
_MORE = {"extend": {"next": 7, "invisible": 60.0}, "renew": {"invisible": 60.0}}


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("name", ["acknowledge", "extend", "renew", "give_back", "lock", "statuses"])
def test_each_finds_its_rows_by_the_key(name: str, waits: bool, engine: Engine) -> None:
    """Also where the planner takes those that are taken for few: its statistics are older than they are."""
    with engine.begin() as connection:
        connection.execute(text("ANALYZE outbox.consumer_message"))
        connection.execute(text(_TAKEN))
        (id_, number) = connection.execute(text("SELECT message_id, lease FROM outbox.consumer_message LIMIT 1")).one()
        values: dict[str, Any] = {"group": "mail", "topic": "orders", "ids": [id_], "numbers": [number]}
        template: Any = getattr(sql, name)
        form = {"waits": waits} if isinstance(template, sql.LeaseTemplate) else {}
        statement = template("outbox", **form, **values, **_MORE.get(name, {}))
        rows = driver_of(connection).execute(f"EXPLAIN {statement.sql}", statement.values).fetchall()
    plan = "\n".join(line for (line,) in rows)
    assert "next_attempt" not in "".join(line for line in plan.splitlines() if "Index" in line and " using " in line), (
        plan
    )
