"""Notifications on a producer's database: new messages in a topic. They carry no truth, only haste."""

from __future__ import annotations

from outbox.store.execute import Statement


def channel(schema: str) -> str:
    """Return the channel on which dispatch tells the topics that have new messages."""
    return f"{schema}.message"


def listen(schema: str) -> str:
    """Return the SQL that subscribes a session to the channel."""
    return f'LISTEN "{channel(schema)}"'


#: The payload that tells dispatchers, and nobody else, that ops are waiting. No topic has this name.
OPS = "!"

#: The payload that a listener sends to itself, to see whether notifications arrive.
PROBE = "?"


def nudge(schema: str) -> Statement:
    """Wake idle dispatchers, in a transaction of its own that waits for no disk: it may get lost."""
    return Statement("SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, %s)", (channel(schema), OPS))


def notify(schema: str, payload: str) -> Statement:
    """Send a notification when the transaction commits."""
    return Statement("SELECT pg_notify(%s, %s)", (channel(schema), payload))
