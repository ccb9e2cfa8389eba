"""What people write by hand: an outbox table with one INSERT, and a queue read with SKIP LOCKED."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from sqlalchemy import Engine, text

_TABLES = """
CREATE TABLE handmade (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id uuid NOT NULL,
    topic text NOT NULL,
    key text,
    body jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE handmade_inbox (
    consumer text NOT NULL,
    message_id uuid NOT NULL,
    received_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, message_id)
);
"""

INSERT = text("INSERT INTO handmade (message_id, topic, key, body) VALUES (:id, :topic, :key, :body)")

INSERT_ALL = text(
    "INSERT INTO handmade (message_id, topic, key, body) "
    "SELECT * FROM unnest("
    "CAST(:ids AS uuid[]), CAST(:topics AS text[]), CAST(:keys AS text[]), CAST(:bodies AS jsonb[]))"
)

TAKE = """
DELETE FROM handmade WHERE id = ANY (ARRAY(
    SELECT id FROM handmade ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED))
RETURNING message_id, topic, key, body
"""

INBOX = "INSERT INTO handmade_inbox (consumer, message_id) SELECT 'hand', * FROM unnest(%s::uuid[])"

FILL = """
INSERT INTO handmade (message_id, topic, key, body)
SELECT gen_random_uuid(), 'transfer', 'account-' || n %% 10000, '{"amount": "12.50", "purpose": "household payment"}'
  FROM generate_series(1, %s) n
"""


def create(engine: Engine) -> None:
    """Create the tables."""
    with engine.begin() as connection:
        connection.execute(text(_TABLES))


def values(topic: str, key: str, order: dict[str, Any]) -> dict[str, Any]:
    """Return the values of one row for `INSERT`."""
    return {"id": uuid4(), "topic": topic, "key": key, "body": json.dumps(order, default=str)}


def columns(topic: str, orders: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of many rows for `INSERT_ALL`."""
    return {
        "ids": [uuid4() for _ in orders],
        "topics": [topic] * len(orders),
        "keys": [order["receiver"] for order in orders],
        "bodies": [json.dumps(order, default=str) for order in orders],
    }
