"""Test Django projects: give sent messages to their handlers, also in a `TestCase`, which never commits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from asgiref.sync import async_to_sync
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from outbox import testing
from outbox.consumer.subscription import Subscription, values_by_header
from outbox.django.databases import configuration, outbox
from outbox.django.functions import OrmFunction
from outbox.message.answer import failures_of
from outbox.message.content import Codecs
from outbox.message.model import Message, Status, read_headers

#: In the order in which they would go out.
_SENT = """
SELECT half.id, half.topic, half.key, half.tag, half.content_type, half.body, half.born_at, half.headers::text
  FROM {s}.half_message half JOIN {s}.op_message op ON op.half_id = half.id
 WHERE op.resolution = 'commit' AND (half.deliver_at IS NULL OR half.deliver_at <= clock_timestamp())
   AND half.topic = %(topic)s
   AND NOT EXISTS (SELECT 1 FROM {s}.consumer_message inbox
                    WHERE inbox.consumer_group = %(group)s AND inbox.message_id = half.id)
 ORDER BY op.sequence
"""
_HANDLED = """
INSERT INTO {s}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts)
VALUES (%(group)s, %(id)s, %(topic)s, 0, 0, 'consumed', 1)
"""
_MOST_PASSES = 100


class NotHandled(AssertionError):
    """A handler didn't take a message: it returned `Retry` or `Park`, or messages never end."""


def drain(using: str | None = None) -> int:
    """Hand sent messages to their handlers, and those that these send, until none is left; return the number of calls.

    In a `TestCase`, or pytest-django's ``db``, all happens in the test's own transaction: each handler in a savepoint,
    in the order in which the messages were sent. An error of a handler reaches the test. Elsewhere, where what is sent
    commits, dispatch and consumers run as in a worker.

    Raises:
        NotHandled: a handler returned `Retry` or `Park`; or the handlers send to each other without end.
    """
    alias = using or DEFAULT_DB_ALIAS
    if not connections[alias].in_atomic_block:
        return testing.drain(outbox(alias)).done
    calls = 0
    for _ in range(_MOST_PASSES):
        before = calls
        for subscription in outbox(alias).subscriptions.values():
            for message in list(_sent(alias, subscription)):
                _handle(alias, subscription, message)
                calls += 1
        if calls == before:
            return calls
    raise NotHandled(f"after {calls} calls of handlers there still are messages: handlers send to each other")


def sent(topic: str | None = None, using: str | None = None) -> list[Message]:
    """Return the sent messages that are there, in the order of sending; of one topic, or of all."""
    alias = using or DEFAULT_DB_ALIAS
    with connections[alias].cursor() as cursor:
        if topic is None:
            cursor.execute(f"SELECT DISTINCT topic FROM {_schema()}.half_message")
            topics = [name for (name,) in cursor.fetchall()]
        else:
            topics = [topic]
    found = [message for name in topics for message in _read(alias, name, "", None, outbox(alias).codecs)]
    return sorted(found, key=lambda message: (message.born_at, message.id))


def _sent(alias: str, subscription: Subscription) -> Iterator[Message]:
    """Return the messages that a group has yet to handle."""
    as_read = subscription.model, subscription.codecs
    for message in _read(alias, subscription.topic, subscription.group, *as_read):
        tagged = subscription.tags is None or message.tag in subscription.tags
        keyed = subscription.keys is None or _matches(message.key, subscription.keys)
        allowed = values_by_header(subscription.headers or ())
        if tagged and keyed and all(message.headers.get(name) in values for name, values in allowed.items()):
            yield message


def _matches(key: str | None, patterns: tuple[str, ...]) -> bool:
    regexes = (".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns)
    return key is not None and any(re.fullmatch(regex, key, re.DOTALL) for regex in regexes)


def _read(alias: str, topic: str, group: str, model: Any, codecs: Codecs) -> Iterator[Message]:
    schema = _schema()
    with connections[alias].cursor() as cursor:
        # The op of a sent message is written by a deferred trigger, and a test has no COMMIT.
        cursor.execute(f"SET CONSTRAINTS {schema}.commit_half IMMEDIATE")
        cursor.execute(f"SET CONSTRAINTS {schema}.commit_half DEFERRED")
        cursor.execute(_SENT.replace("{s}", schema), {"topic": topic, "group": group})
        rows = cursor.fetchall()
    for position, (id_, name, key, tag, content_type, body, born_at, headers) in enumerate(rows, 1):
        sent_headers, encoding = read_headers(headers)
        known = id_, name, 0, position, key, tag, content_type, bytes(body), born_at, born_at, 1, 1, sent_headers
        yield Message(*known, model, codecs, encoding, group=group or None)


def _handle(alias: str, subscription: Subscription, message: Message) -> None:
    handler: Any = subscription.function
    function = handler.function if isinstance(handler, OrmFunction) else inspect.unwrap(handler)
    with transaction.atomic(alias):
        answer = function([message] if subscription.takes_batch else message)
        if inspect.iscoroutine(answer):
            answer = async_to_sync(lambda: answer)()
        (failure,), _ = failures_of(answer, 1 if subscription.takes_batch else None)
        if failure is not None and failure.status is not Status.CONSUMED:
            raise NotHandled(f"group {subscription.group!r} answered {message!r} with {answer!r}")
        with connections[alias].cursor() as cursor:
            values: dict[str, Any] = {"group": subscription.group, "id": message.id, "topic": message.topic}
            cursor.execute(_HANDLED.replace("{s}", _schema()), values)


def _schema() -> str:
    return f'"{configuration().outbox.schema}"'
