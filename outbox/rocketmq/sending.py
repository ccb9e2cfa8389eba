"""Take what clients send: messages in a group commit, verdicts on halves, recalls.

What comes within two milliseconds is one transaction, and is answered after its COMMIT. Its messages have ids made of
those of their clients, so that one which is sent again because the answer was lost is no second message.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from outbox.acts.changes import Actor, Target, apply, requested
from outbox.acts.messages import ACTS
from outbox.database.decision import already
from outbox.database.execute import Template, execute
from outbox.database.sql import plan_by_index, wait_at_most
from outbox.errors import OutboxBusy, OutboxError
from outbox.message.content import ENCODING_HEADER
from outbox.message.model import Decision, Preparation, Resolution
from outbox.rocketmq.clients import Client
from outbox.rocketmq.mapping import ID_HEADER, TYPE_HEADER, difference, half_ids, inbound, recall_handle, recalled_id
from outbox.rocketmq.options import must
from outbox.rocketmq.rules import DELAY, TRANSACTION, Refused, check_message, check_topic, check_type, refusal_of
from outbox.rocketmq.tables import Tables, is_unreached
from outbox.rocketmq.wire import WIRE, WireCode, new, status_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: Whose the halves are that clients of the server have sent: its check alone asks about them.
ASKER = "rocketmq"

#: For so long (seconds) one transaction waits for the end of the one before: the fewer, the more they have in common.
_PATIENCE = 0.05
#: How long (seconds) a message waits for others, and how large one transaction may get.
_GATHER = 0.002
_MOST_ITEMS, _MOST_BYTES = 500, 16 * 1024 * 1024
#: So long (seconds) a verdict waits for a row that another transaction has; then its client is told to come again.
_BRIEFLY = 0.5
#: So many messages, and so many bytes of them, may wait; then clients are told to come again.
_MOST_WAITING, _MOST_WAITING_BYTES = 20_000, 256 * 1024 * 1024

_THERE: Template = Template("SELECT id FROM {s}.half_message WHERE id = ANY (%s)")
#: Rows: ``(id, and what `difference` compares)`` of messages.
_STORED: Template = Template(f"""
SELECT id, headers ->> '{TYPE_HEADER}', headers ->> '{ENCODING_HEADER}', key, tag, body FROM {{s}}.half_message
 WHERE id = ANY (%s)
""")
#: Rows: ``(the client's id,)`` of a message that a client has sent to a topic.
_SENT: Template = Template(f"""
SELECT headers ->> '{ID_HEADER}' FROM {{s}}.half_message
 WHERE id = %s AND topic = %s AND headers ->> '{ID_HEADER}' IS NOT NULL
""")
# As outbox/database/decision.py, for several halves of clients at once: a half of another sender's isn't a client's to
# decide. The checks are locked first, in one order; the insert decides every race.
#: Decide halves that clients have sent to these topics. Rows: ``(id, topic, verdict)`` of those that there are; NULL:
#: it was decided before.
_DECIDE: Template = Template(f"""
WITH half AS MATERIALIZED (
    SELECT h.id, h.topic, g.resolution
      FROM unnest(%(ids)s::uuid[], %(topics)s::text[], %(resolutions)s::text[]) g (id, topic, resolution)
      JOIN {{s}}.half_message h ON h.id = g.id AND h.topic = g.topic AND h.headers ->> '{ID_HEADER}' IS NOT NULL
), locked AS MATERIALIZED (
    SELECT half_id FROM {{s}}.half_check WHERE half_id IN (SELECT id FROM half) ORDER BY half_id FOR UPDATE
), decided AS (
    INSERT INTO {{s}}.op_message (half_id, resolution, decided_by)
    SELECT id, resolution, 'producer' FROM half CROSS JOIN (SELECT count(*) FROM locked) l ORDER BY id
    ON CONFLICT (half_id) DO NOTHING
    RETURNING half_id, resolution
), unchecked AS (
    DELETE FROM {{s}}.half_check WHERE half_id IN (SELECT half_id FROM decided)
)
SELECT half.id, half.topic, decided.resolution FROM half LEFT JOIN decided ON decided.half_id = half.id
""")
#: Rows: ``(half id, verdict, its giver)`` of halves that are decided.
OPS: Template = Template("SELECT half_id, resolution, decided_by FROM {s}.op_message WHERE half_id = ANY (%s)")
_NO_TIME = dt.datetime.fromtimestamp(0, dt.UTC)
_RESOLUTIONS = {
    WIRE.enums["TransactionResolution"]["COMMIT"]: Resolution.COMMIT,
    WIRE.enums["TransactionResolution"]["ROLLBACK"]: Resolution.ROLLBACK,
}


@dataclass(eq=False)
class CallItem:
    """What a `GroupCommit` takes of a client's call on a topic; ``refused`` is why it wasn't written, if it wasn't."""

    client: str
    topic: str
    refused: Refused | None = field(default=None, kw_only=True)
    size: int = field(default=0, kw_only=True)


@dataclass(eq=False)
class SendItem(CallItem):
    """A message to send by a user, and the id that it is stored under; its size is that of its body.

    ``again``: there is one of this id already.
    """

    message: Any
    kind: int
    half_id: UUID | None = None
    user: str = field(default="", kw_only=True)
    again: bool = field(default=False, kw_only=True)

    def met(self) -> None:
        """Note that there is one of its id already."""
        self.again = True


W = TypeVar("W", bound=CallItem)


class GroupCommit(Generic[W]):
    """Gathers items of calls for a moment, and writes them in one transaction; several run at once.

    ``transaction`` writes them. ``pause`` is how long (seconds) the first one waits for others, ``call`` names the call
    in the log.
    """

    def __init__(
        self, tables: Tables, transaction: Callable[[Sequence[W], Connection], None], call: str, pause: float
    ) -> None:
        self._tables = tables
        self._transaction = transaction
        self._call = call
        self._pause = pause
        self._waiting: list[tuple[list[W], asyncio.Future[None]]] = []
        self._writes = set[asyncio.Future[None]]()
        self._flush: asyncio.Task[None] | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._items, self._bytes = 0, 0

    async def write(self, items: list[W]) -> None:
        """Write items; return once they are committed, or each of the others says why it isn't."""
        size = sum(item.size for item in items)
        if self._items + len(items) > _MOST_WAITING or self._bytes + size > _MOST_WAITING_BYTES:
            raise Refused(WireCode.TOO_MANY_REQUESTS, "too many requests wait to be written; try again later")
        self._items, self._bytes = self._items + len(items), self._bytes + size
        try:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((items, done))
            self._gather_soon()
            await done
        finally:
            self._items, self._bytes = self._items - len(items), self._bytes - size

    def _gather_soon(self) -> None:
        if self._flush is None and self._waiting:
            self._flush = asyncio.create_task(self._gather())
            self._tasks.add(self._flush)
            self._flush.add_done_callback(self._tasks.discard)

    async def _gather(self) -> None:
        await asyncio.sleep(self._pause)
        if self._writes:  # what comes meanwhile is written together
            await asyncio.wait(self._writes, timeout=_PATIENCE)
        batch, number, size = 0, 0, 0
        while batch < len(self._waiting) and (not batch or (number < _MOST_ITEMS and size < _MOST_BYTES)):
            items = self._waiting[batch][0]
            batch, number, size = batch + 1, number + len(items), size + sum(item.size for item in items)
        together, self._waiting = self._waiting[:batch], self._waiting[batch:]
        items = [item for of_one, _ in together for item in of_one]
        write = asyncio.get_running_loop().run_in_executor(self._tables.threads, self.write_now, items)
        self._writes.add(write)
        self._flush = None
        self._gather_soon()
        await asyncio.wait({write})
        self._writes.discard(write)
        for _, done in together:
            if not done.done():  # its client may have gone away meanwhile
                done.set_result(None)

    def write_now(self, items: Sequence[W]) -> None:
        """Write items in one transaction; those that fail together are tried in halves, down to the one to blame."""
        if not (left := [item for item in items if item.refused is None]):
            return
        try:
            self._tables.do(partial(self._transaction, left))
        except Exception as error:
            busy = error.topic if isinstance(error, OutboxBusy) else None
            if blamed := [item for item in left if item.topic == busy]:
                self._refuse(blamed, error)
                self.write_now(left)
            elif len(left) == 1 or is_unreached(error):  # fewer won't help
                self._tables.tell_call_failed(self._call, left[0].client, left[0].topic, error)
                self._refuse(left, error)
            else:
                for half in (left[: len(left) // 2], left[len(left) // 2 :]):
                    self.write_now(half)

    def _refuse(self, items: Sequence[W], error: Exception) -> None:
        for item in items:
            item.refused = refusal_of(error)


@dataclass(eq=False)
class EndItem(CallItem):
    """A verdict of a client; ``earlier`` is the one that counts, and its giver: None if there is no such half."""

    half_id: UUID
    resolution: Resolution
    earlier: tuple[Resolution, str] | None = None


class SendCalls:
    """The calls of producers."""

    def __init__(self, tables: Tables, hand_over: Callable[[UUID, str, Resolution], Any]) -> None:
        """``hand_over`` gives a verdict to the check that waits for it, if one does; it returns what to await then."""
        self._tables = tables
        self._hand_over = hand_over
        self._ends: GroupCommit[EndItem] = GroupCommit(tables, self._decide, "EndTransaction", _GATHER)
        self.commits: GroupCommit[SendItem] = GroupCommit(tables, self._transaction, "SendMessage", _GATHER)

    async def send_message(self, request: Any, client: Client) -> Any:
        """Send or prepare messages of one topic; each has an entry in the answer."""
        messages = list(request.messages)
        if not messages:
            raise Refused(WireCode.MESSAGE_CORRUPTED, "no message to send")
        topic = client.name_of(messages[0].topic)
        if any(client.name_of(message.topic) != topic for message in messages):
            raise Refused(WireCode.MESSAGE_CORRUPTED, "topic in message is not same")
        must(client.user.may_send(check_topic(topic)), f"send to topic {topic}")
        now, expected = self._tables.clock(), self._tables.options.topic(topic).type
        most = self._tables.settings.max_body_bytes
        kinds = [check_message(message, now, most) for message in messages]
        await self._tables.queues(topic)
        for kind in kinds:
            check_type(expected, kind)
        user = client.user.name
        items = [
            SendItem(client.id, topic, message, kind, size=len(message.body), user=user)
            for message, kind in zip(messages, kinds, strict=True)
        ]
        await self.commits.write(items)
        if again := [item for item in items if item.again and item.refused is None]:
            await self._tables.run(partial(self._compare, again))
        if TRANSACTION in kinds:
            client.transactions.add(topic)
        entries = [_entry(item) for item in items]
        return new("SendMessageResponse", status=overall([entry.status for entry in entries]), entries=entries)

    def _transaction(self, items: Sequence[SendItem], connection: Connection) -> None:
        outbox, now = self._tables.outbox, self._tables.now(connection)
        for item in items:
            sender, item.again = (item.user, item.client), False
            ids = half_ids(item.topic, sender, item.message.system_properties.message_id, now)
            if len(ids) > 1:
                (there,) = execute(connection, _THERE(self._tables.schema, ids))
                ids = [id_ for (id_,) in there] or ids
            declared = outbox.topics.get(item.topic)
            content_type = None if declared is None else declared.content_type
            message = inbound(item.message, item.kind, ids[0], item.client, content_type)
            preparation = None
            if item.kind == TRANSACTION:
                immunity = self._tables.settings.immunity if message.immunity is None else message.immunity
                preparation = Preparation(False, immunity, ASKER)
            try:
                # A neighbour's way in: what it sends has been checked by its own rules.
                outbox._producer.take(connection, item.topic, message.outgoing, message.own, preparation, item.met)
            except OutboxError as error:
                item.refused = refusal_of(error)
            else:
                item.half_id = ids[0]

    def _compare(self, items: Sequence[SendItem], connection: Connection) -> None:
        """Refuse what came under the id of another message: an OK would say that it is stored."""
        (rows,) = execute(connection, _STORED(self._tables.schema, [item.half_id for item in items]))
        stored = {id_: half for id_, *half in rows}
        for item in items:
            half = stored.get(item.half_id)  # none if it was pruned meanwhile
            if half is not None and (what := difference(item.message, item.kind, half)):
                id_ = item.message.system_properties.message_id
                text = (
                    f"message {id_} of topic {item.topic} was sent before with another {what}; give it an id of its own"
                )
                item.refused = Refused(WireCode.ILLEGAL_MESSAGE_ID, text)

    async def end_transaction(self, request: Any, client: Client) -> Any:
        """Decide a half: the first verdict wins, the same one again is in order, another one is refused."""
        topic = client.topic_of(request.topic)
        must(client.user.may_send(topic), f"decide messages of topic {topic}")
        if not request.transaction_id.strip():
            raise Refused(WireCode.INVALID_TRANSACTION_ID, "transaction id cannot be empty")
        unknown = Refused(WireCode.INVALID_TRANSACTION_ID, "no transaction of this id and topic is known")
        try:
            half_id = UUID(request.transaction_id)
        except ValueError:
            raise unknown from None
        resolution = _RESOLUTIONS.get(request.resolution, Resolution.UNKNOWN)
        if (recorded := self._hand_over(half_id, topic, resolution)) is not None:
            await recorded
        if resolution is not Resolution.UNKNOWN:
            item = EndItem(client.id, topic, half_id, resolution)
            await self._ends.write([item])
            if item.refused is not None:
                raise item.refused
            if item.earlier is None:
                raise unknown
            verdict, by = item.earlier
            if verdict is not resolution:
                error = already(Decision(half_id, verdict, by, _NO_TIME, first=False))
                raise Refused(WireCode.PRECONDITION_FAILED, str(error))
        return new("EndTransactionResponse", status=status_of(WireCode.OK))

    def _decide(self, items: Sequence[EndItem], connection: Connection) -> None:
        # By the topic too: another client's verdict may name a wrong one. Of those of one half, the first one counts.
        schema, of_half = self._tables.schema, {(item.half_id, item.topic): item for item in reversed(items)}
        several = [of_half[half] for half in sorted(of_half)]
        columns = {
            "ids": [item.half_id for item in several],
            "topics": [item.topic for item in several],
            "resolutions": [item.resolution.value for item in several],
        }
        *_, rows = execute(connection, wait_at_most(_BRIEFLY), plan_by_index(), _DECIDE(schema, **columns))
        topics = {half_id: topic for half_id, topic, _ in rows}
        earlier = {half_id: (Resolution(verdict), "producer") for half_id, _, verdict in rows if verdict is not None}
        if left := [half_id for half_id, _, verdict in rows if verdict is None]:
            # A statement of its own: its snapshot sees the ops that the insert has waited for.
            (rows,) = execute(connection, OPS(schema, left))
            earlier |= {half_id: (Resolution(verdict), by) for half_id, verdict, by in rows}
        for item in items:
            item.earlier = earlier.get(item.half_id) if topics.get(item.half_id) == item.topic else None
        if any(item.resolution is Resolution.COMMIT for item in items):
            self._tables.outbox._producer.wake_dispatchers(connection)

    async def recall_message(self, request: Any, client: Client) -> Any:
        """Take a delayed message back; again is in order."""
        topic = client.topic_of(request.topic)
        must(client.user.may_send(topic), f"recall messages of topic {topic}")
        if not self._tables.options.recall:
            raise Refused(WireCode.INTERNAL_SERVER_ERROR, "recall failed, operation is forbidden")
        half_id = recalled_id(request.recall_handle, topic)
        message_id = await self._tables.run(partial(self._recall, half_id, topic, client))
        return new("RecallMessageResponse", status=status_of(WireCode.OK), message_id=message_id)

    def _recall(self, half_id: UUID, topic: str, client: Client, connection: Connection) -> str:
        # A handle has no secret: what it says of the topic counts if the message says so too.
        _, sent = execute(connection, wait_at_most(_BRIEFLY), _SENT(self._tables.schema, half_id, topic))
        if not sent:
            raise Refused(WireCode.INTERNAL_SERVER_ERROR, "recall failed, timestamp invalid")
        origin = {"via": ASKER, "ip": client.host}
        by = Actor(client.id[:200], origin)
        request = requested(ACTS["recall"], by, "recalled by its sender", {})
        (outcome,) = apply(connection, self._tables.settings, request, [Target(half_id)])
        if not (outcome.state == "done" or outcome.was == "recalled"):
            raise Refused(WireCode.INTERNAL_SERVER_ERROR, "recall failed, timestamp invalid")
        return str(sent[0][0])


def overall(statuses: Sequence[Any]) -> Any:
    """Return the status of an answer of several: the one that all have, or that there are several."""
    codes = {status.code for status in statuses}
    return statuses[0] if len(codes) == 1 else status_of(WireCode.MULTIPLE_RESULTS)


def _entry(item: SendItem) -> Any:
    if item.refused is not None:
        return new("SendResultEntry", status=status_of(item.refused.code, str(item.refused)))
    id_ = item.message.system_properties.message_id
    entry = new("SendResultEntry", status=status_of(WireCode.OK), message_id=id_, transaction_id=id_)
    if item.kind == TRANSACTION:
        entry.transaction_id = str(item.half_id)
    elif item.kind == DELAY and item.half_id is not None:
        entry.recall_handle = recall_handle(item.topic, item.half_id)
    return entry
