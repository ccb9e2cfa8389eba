"""Hand messages to consumers under leases, and settle them: the calls of consumers.

The polls of one group, topic and filter share one taker: it takes for one after the other, and while there is nothing
it looks once for all of them. A notification wakes it, else it looks again after ``idle_wait``. What is taken is a row
with a lease (`outbox.consumer.leased`), so any server takes its handle, and a server that dies loses nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.consumer.leased import settlement
from outbox.consumer.leased.settlement import LONGEST_LEASE, MessageLease, RowHeld, Settlement, Taken
from outbox.errors import BadExpression
from outbox.message.answer import HandlerFailure
from outbox.message.model import Message, Status
from outbox.rocketmq.clients import SIMPLE_CONSUMER, Client, Clients
from outbox.rocketmq.expression import compile_expression
from outbox.rocketmq.mapping import keys_of, lease_of, wire_message
from outbox.rocketmq.routes import BATCH, POLLING
from outbox.rocketmq.rules import OWN_PREFIXES, Refused, check_invisible
from outbox.rocketmq.sending import CallItem, GroupCommit, overall
from outbox.rocketmq.tables import Tables
from outbox.rocketmq.wire import WIRE, WireCode, millis, new, status_of, time_fields
from outbox.telemetry.events import ClientFiltersDiffer
from outbox.telemetry.hooks import emit
from outbox.text import cut, topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.leases import LeasedGroup

#: The lease (seconds) of a message whose client has the server renew it, how often that is done, and for how long.
RENEWED, _RENEW_EVERY, _RENEW_FOR = 60.0, 20.0, 3 * 3600.0
_LEAST_POLLING = 5.0
#: So long (seconds) before the deadline of its call a poll is answered.
_MARGIN = 1.5
#: So many takes of one taker run at once, if there are messages.
_TAKES = 4
_ACKS_GATHER = 0.005
_SQL = WIRE.enums["FilterType"]["SQL"]
#: Clients that give a failed message back at once, against the server's delays: Node's calls itself so, or HTTP.
_IMPATIENT = frozenset({"HTTP", "NODE_JS"})
#: So many takers or groups, and those that are idle are forgotten; answers of so many bytes are made in the loop.
_FORGET, _SMALL = 1_000, 64 * 1024
#: So many characters of a filter are told, and so many filters beside it.
_SHOWN, _MOST_SHOWN = 200, 10
_EXPIRED = "receipt handle is expired"
#: After so many seconds each, a row that another transaction has is tried again; then the client is told to.
_AGAIN = (0.05, 0.1, 0.2, 0.4)
_HELD = "another transaction is settling the message; try again later"

Accepts = Callable[[Message], bool]
T = TypeVar("T")


def filter_of(expression: Any) -> tuple[str, Accepts | None]:
    """Return a filter's name and function; None lets all pass.

    Raises:
        Refused: it is none.
    """
    text = expression.expression.strip()
    if expression.type == _SQL:
        try:
            matches = compile_expression(text)
        except BadExpression as error:
            raise Refused(WireCode.ILLEGAL_FILTER_EXPRESSION, str(error)) from None
        return f"SQL {text}", lambda message: matches(_properties(message))
    if text in {"", "*"}:
        return "*", None
    tags = {tag.strip() for tag in text.split("||")} - {""}
    if not tags:
        raise Refused(WireCode.ILLEGAL_FILTER_EXPRESSION, "subString split error")
    return f"TAG {' || '.join(sorted(tags))}", lambda message: message.tag in tags


def _properties(message: Message) -> dict[str, str]:
    found = {name: text for name, text in message.headers.items() if not name.startswith(OWN_PREFIXES)}
    if message.tag is not None:
        found["TAGS"] = message.tag
    if keys := keys_of(message.headers):
        found["KEYS"] = " ".join(keys)
    return found


@dataclass(eq=False, slots=True)
class Poll:
    """A receive: it waits for so many messages, which are invisible for so long (seconds) then.

    ``sent`` is how many of those that it got its client was sent.
    """

    client: str
    most: int
    invisible: float
    take_id: str | None
    sent: int = 0
    done: asyncio.Future[list[Taken]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_new: bool = False
    taking: bool = False
    ended: bool = False


class SharedTaker:
    """Takes messages for all polls of one group, topic and filter."""

    def __init__(self, tables: Tables, group: LeasedGroup[Any], accepts: Accepts | None) -> None:
        self._tables = tables
        self.group: LeasedGroup[Any] = group
        self._accepts = accepts
        self._polls: deque[Poll] = deque()
        self._news = asyncio.Event()
        self._takes = set[asyncio.Task[None]]()
        self._ended = False
        self.polled_at: float = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Does no poll wait?"""
        return not self._polls and not self._running

    def wake(self) -> None:
        """Look again now: there may be messages."""
        self._news.set()

    async def poll(self, poll: Poll, seconds: float) -> list[Taken]:
        """Return messages once there are some; none if none has come within so many seconds."""
        self.polled_at = time.monotonic()
        if poll.take_id is None:
            self._polls.append(poll)
        else:  # it may be repeated, and have messages already, of which no news will tell
            poll.is_new = True
            self._polls.appendleft(poll)
            self.wake()
        self._more_takes(1)
        try:
            await asyncio.wait({poll.done}, timeout=seconds)
            if not poll.done.done() and poll.taking:
                await asyncio.wait({poll.done}, timeout=_MARGIN)
        finally:  # also where its client has gone away
            poll.ended = True
        return poll.done.result() if poll.done.done() else []

    def end(self) -> None:
        """Answer all polls: the server stops."""
        self._ended = True
        for poll in self._polls:
            if not poll.done.done():
                poll.done.set_result([])
        self._polls.clear()
        self._news.set()

    @property
    def _running(self) -> int:
        """How many takes run: one that has ended is among them until the loop comes round, and serves no poll."""
        return sum(not each.done() for each in self._takes)

    def _more_takes(self, most: int) -> None:
        if self._running < most and self._polls:
            task = asyncio.create_task(self._serve())
            self._takes.add(task)
            task.add_done_callback(self._takes.discard)

    async def _serve(self) -> None:
        while self._polls:
            self._news.clear()
            poll = self._polls.popleft()
            if poll.ended:
                continue
            poll.taking, poll.is_new = True, False
            try:
                taken = await self._tables.lend(partial(self._take, poll))
            except Exception as error:  # its call answers, and tells the log
                if not poll.done.done():
                    poll.done.set_exception(error)
                continue
            poll.taking = False
            if not taken:
                if self._ended and not poll.done.done():
                    poll.done.set_result([])
                elif not poll.ended:
                    self._polls.append(poll)
                if self._running > 1:  # one that looks again is enough
                    return
                if not (self._polls and self._polls[0].is_new):
                    await self._tables.pause(self._news)
            elif poll.ended or poll.done.done():
                await self._give_back(taken)
            else:
                poll.done.set_result(taken)
                self._more_takes(_TAKES)

    def _take(self, poll: Poll, connection: Connection) -> list[Taken]:
        named = {"taker": poll.client, "take_id": poll.take_id, "invisible": poll.invisible}
        return self.group.take_on(connection, connection, poll.most, accepts=self._accepts, **named)

    async def take_back(self, poll: Poll) -> None:
        """Give back what a poll has got that its client wasn't sent: its call has ended before."""
        if poll.done.done() and not poll.done.cancelled() and poll.done.exception() is None:
            await self._give_back(poll.done.result()[poll.sent :])

    async def _give_back(self, taken: Sequence[Taken]) -> None:
        """Have messages due again that were taken for a poll whose client has gone.

        One that comes again under the same attempt id before has them already, under leases of its own.
        """
        if not taken:
            return
        try:
            leases = [each.lease for each in taken]
            await self._tables.run(partial(settlement.give_back, schema=self._tables.schema, leases=leases))
        except Exception as error:  # they come again when their leases end
            self._tables.tell_failure("rocketmq receive", error)
        self.wake()


@dataclass(eq=False)
class AckItem(CallItem):
    """A message to acknowledge, and what came of it."""

    lease: MessageLease
    outcome: Settlement = Settlement.LATE


class Renewals:
    """The leases that this server renews, for as long as their clients are there."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._held: dict[tuple[str, str], dict[MessageLease, tuple[Client, float]]] = {}
        self._renewing = set[tuple[str, str]]()

    def add(self, leases: Sequence[MessageLease], client: Client) -> None:
        """Renew leases from now on."""
        for lease in leases:
            self._held.setdefault((lease.group, lease.topic), {})[lease] = client, time.monotonic()

    def drop(self, lease: MessageLease) -> None:
        """Renew a lease no more: it was settled."""
        self._held.get((lease.group, lease.topic), {}).pop(lease, None)

    async def once(self) -> None:
        """Renew what belongs to clients that are there; let go of what has ended, and of clients that are gone.

        One that has said goodbye isn't gone before its leases have ended: another client may have said so for it.
        """
        now = time.monotonic()
        for pair, held in list(self._held.items()):
            for lease, (client, since) in list(held.items()):
                if since < now - _RENEW_FOR or not (client.is_there or client.heard_at > now - RENEWED):
                    del held[lease]
            if not held:
                del self._held[pair]
        # At once, each by itself: a group that fails, or that isn't through yet, leaves the others theirs.
        await asyncio.gather(*(self._renew(pair, held) for pair, held in self._held.items()))

    async def _renew(self, pair: tuple[str, str], held: dict[MessageLease, tuple[Client, float]]) -> None:
        if pair in self._renewing:
            return
        leases = [lease for lease, (client, _) in held.items() if client.is_there]
        renew = partial(settlement.renew, schema=self._tables.schema, leases=leases, seconds=RENEWED)
        self._renewing.add(pair)
        try:
            renewed = await self._tables.run(renew)
        except Exception as error:  # they are tried again, before their leases end
            self._tables.tell_failure("rocketmq renewal", error)
            return
        finally:
            self._renewing.discard(pair)
        for lease in leases:
            if lease.message_id not in renewed:
                held.pop(lease, None)


class ReceiveCalls:
    """The calls of consumers."""

    def __init__(self, tables: Tables, clients: Clients) -> None:
        self._tables = tables
        self._clients = clients
        self._groups: dict[tuple[str, str], LeasedGroup[Any]] = {}
        self._takers: dict[tuple[str, str, str], SharedTaker] = {}
        self._acks: GroupCommit[AckItem] = GroupCommit(tables, self._acknowledge, "AckMessage", _ACKS_GATHER)
        self.renewals: Renewals = Renewals(tables)
        self._stopping = False
        self._tasks = set[asyncio.Task[None]]()

    async def renew(self) -> None:
        """Renew leases every now and then, until it is cancelled; a round waits for none before it."""
        async with asyncio.TaskGroup() as rounds:
            while True:
                await asyncio.sleep(_RENEW_EVERY)
                rounds.create_task(self.renewals.once())

    def wake(self, topic: str | None) -> None:
        """Have the polls of a topic look again; None: all. To be called in the loop."""
        for (_, of_topic, _), taker in self._takers.items():
            if topic in {None, of_topic}:
                taker.wake()

    def consumed(self) -> set[tuple[str, str]]:
        """Return the groups and topics for which a client has polled lately."""
        lately = time.monotonic() - RENEWED
        return {key[:2] for key, taker in self._takers.items() if taker.polled_at > lately}

    def end(self) -> None:
        """Answer all polls, and take nothing more."""
        self._stopping = True
        for taker in self._takers.values():
            taker.end()

    async def drain(self, within: float) -> None:
        """Return once what was cut off is given back, in so many seconds at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within)

    def _pair(self, request: Any, client: Client) -> tuple[str, str]:
        """Return group and topic of a request, which its user may receive."""
        named = request.message_queue.topic if hasattr(request, "message_queue") else request.topic
        return client.pair_of(request.group, named)

    def _group(self, group: str, topic: str) -> LeasedGroup[Any]:
        """Return a group of a topic; a new one is made by its first receive."""
        if (known := self._groups.get((group, topic))) is None:
            options = self._tables.options.group(group)
            delays = options.retry_delays or (0.0,)
            retries = [delays[min(number, len(delays) - 1)] for number in range(options.max_attempts - 1)]
            ordered = {"ordered": "key", "on_exhausted": "skip"} if options.fifo else {}
            declared: dict[str, Any] = {"retry_delays": tuple(retries), "start": options.start, **ordered}
            if (topic, group) in self._tables.outbox.subscriptions:
                text = f"group {group} of topic {topic} has a handler in this application; choose another group"
                raise Refused(WireCode.ILLEGAL_CONSUMER_GROUP, text)
            self._forget_idle()
            known = self._groups[group, topic] = self._tables.leased(topic, group, **declared)
        return known

    # --- receive -----------------------------------------------------------------------------------------------------

    async def receive_message(
        self, request: Any, client: Client, remaining: float | None, at_end: Callable[[Callable[[Any], None]], None]
    ) -> Iterator[Any]:
        """Return the parts of the answer: a status, the messages, and the time; ``remaining`` seconds are left.

        Each part is asked for once the one before is out. ``at_end`` has a function called when the call has ended,
        which may be at any moment: what wasn't sent is given back then.
        """
        group, topic = self._pair(request, client)
        client.group = client.group or group
        invisible = RENEWED if request.auto_renew else check_invisible(millis(request.invisible_duration) / 1000)
        polling = _polling(request, remaining)
        name, accepts = filter_of(request.filter_expression)
        if request.batch_size < 0:
            raise Refused(WireCode.BAD_REQUEST, f"batch size {request.batch_size} must be 0 or more")
        await self._tables.queues(topic)
        if not request.batch_size or self._stopping:
            return iter(self._parts([], request.message_queue.topic))
        fifo = self._tables.options.group(group).fifo
        take_id = _take_id(request, client, name) if fifo and request.attempt_id else None
        poll = Poll(client.taker, min(request.batch_size, BATCH), invisible, take_id)
        taker = self._taker(group, topic, name, accepts)
        at_end(lambda _: self._soon(taker.take_back(poll)))
        taken = await taker.poll(poll, polling)
        if sum(len(each.message.stored) for each in taken) < _SMALL:
            parts = self._parts(taken, request.message_queue.topic)
        else:
            # Digests of many megabytes would hold up all other calls.
            parts = await asyncio.get_running_loop().run_in_executor(
                self._tables.threads, self._parts, taken, request.message_queue.topic
            )
        return self._sent(parts, poll, taken, client if request.auto_renew else None)

    def _sent(self, parts: Sequence[Any], poll: Poll, taken: Sequence[Taken], renewed: Client | None) -> Iterator[Any]:
        """Yield the parts of an answer, and count those that are out; renew the leases once all are."""
        for part in parts:
            yield part
            poll.sent += part.HasField("message")
        if renewed is not None:
            self.renewals.add([each.lease for each in taken], renewed)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that no call waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _taker(self, group: str, topic: str, name: str, accepts: Accepts | None) -> SharedTaker:
        if (taker := self._takers.get((group, topic, name))) is None:
            self._forget_idle()
            of_group = {key: each for key, each in self._takers.items() if key[:2] == (group, topic)}
            if busy := [key[2] for key, each in of_group.items() if time.monotonic() - each.polled_at < RENEWED]:
                shown = tuple(cut(each, _SHOWN) for each in (*busy[:_MOST_SHOWN], name))
                emit(ClientFiltersDiffer(group=group, topic=topic, filters=shown))
            taker = SharedTaker(self._tables, self._group(group, topic), accepts)
            self._takers[group, topic, name] = taker
        return taker

    def _forget_idle(self) -> None:
        """Forget takers and groups for which no poll waits, where there are many: clients make them by any name."""
        if max(len(self._takers), len(self._groups)) >= _FORGET:
            self._takers = {key: each for key, each in self._takers.items() if not each.is_idle}
            busy = {key[:2] for key in self._takers}
            self._groups = {pair: each for pair, each in self._groups.items() if pair in busy}

    def _parts(self, taken: Sequence[Taken], topic: Any) -> list[Any]:
        """Return the parts of an answer with messages, or without; ``topic`` is what the client calls it."""
        status = status_of(WireCode.OK) if taken else status_of(WireCode.MESSAGE_NOT_FOUND, "no new message")
        messages: list[dict[str, Any]] = [{"message": self._message(each, topic)} for each in taken]
        at = {"delivery_timestamp": time_fields(int(time.time() * 1000))}
        return [new("ReceiveMessageResponse", **part) for part in ({"status": status}, *messages, at)]

    def _message(self, taken: Taken, topic: Any) -> Any:
        message, lease = taken.message, taken.lease
        made = wire_message(message, topic, fifo=self._tables.options.group(lease.group).fifo)
        system = made.system_properties
        system.receipt_handle, system.delivery_attempt = lease.handle, taken.attempt
        system.queue_id, system.queue_offset, system.store_host = lease.queue, lease.position, self._tables.host
        system.store_timestamp.FromDatetime(message.visible_at)
        return made

    # --- settle ------------------------------------------------------------------------------------------------------

    async def ack_message(self, request: Any, client: Client) -> Any:
        """Settle messages as consumed; each has an entry in the answer."""
        group, topic = self._pair(request, client)
        if not request.entries:
            raise Refused(WireCode.BAD_REQUEST, "no message to acknowledge")
        items: list[AckItem | Refused] = []
        for entry in request.entries:
            try:
                items.append(AckItem(client.id, topic, lease_of(entry.receipt_handle, group, topic)))
            except Refused as refused:
                items.append(refused)
        left = [item for item in items if isinstance(item, AckItem)]
        await self._acks.write(left)
        for pause in _AGAIN:
            if not (left := [item for item in left if item.outcome is Settlement.HELD and item.refused is None]):
                break
            await asyncio.sleep(pause)
            await self._acks.write(left)
        entries = []
        for entry, item in zip(request.entries, items, strict=True):
            named = {"message_id": entry.message_id, "receipt_handle": entry.receipt_handle}
            entries.append(new("AckMessageResultEntry", status=self._acknowledged(item), **named))
        if self._tables.options.group(group).fifo:
            self.wake(topic)
        return new("AckMessageResponse", status=overall([entry.status for entry in entries]), entries=entries)

    def _acknowledged(self, item: AckItem | Refused) -> Any:
        refused = item if isinstance(item, Refused) else item.refused
        if refused is not None:
            return status_of(refused.code, str(refused))
        assert isinstance(item, AckItem)  # noqa: S101 - the other one was refused
        if item.outcome is Settlement.HELD:
            return status_of(WireCode.TOO_MANY_REQUESTS, _HELD)
        self.renewals.drop(item.lease)
        if item.outcome is Settlement.LATE:
            return status_of(WireCode.INVALID_RECEIPT_HANDLE, _EXPIRED)
        return status_of(WireCode.OK)

    def _acknowledge(self, items: Sequence[AckItem], connection: Connection) -> None:
        outcomes = settlement.acknowledge(connection, self._tables.schema, [item.lease for item in items], waits=False)
        for item, outcome in zip(items, outcomes, strict=True):
            item.outcome = outcome

    async def change_invisible_duration(self, request: Any, client: Client) -> Any:
        """Have a message due after another time; of a push consumer it means that its listener failed.

        Clients take the handle of the answer, also of one that is refused: then it is the one that they have.
        """
        handle, status = request.receipt_handle, status_of(WireCode.OK)
        try:
            handle = await self._change(request, client)
        except Refused as refused:
            status = status_of(refused.code, str(refused))
        return new("ChangeInvisibleDurationResponse", status=status, receipt_handle=handle)

    async def _change(self, request: Any, client: Client) -> str:
        group, topic = self._pair(request, client)
        seconds = check_invisible(millis(request.invisible_duration) / 1000, 0)
        lease = lease_of(request.receipt_handle, group, topic)
        if client.is_push:
            options = self._tables.options.group(group)
            impatient = client.language in _IMPATIENT if options.raise_nacks is None else options.raise_nacks
            reason = f"client {client.id} gave it back"
            await self._fail(lease, HandlerFailure(reason, delay=None if impatient else seconds))
            handle = str(request.receipt_handle)
        else:
            # The number is drawn here: the statement is done again where the answer to its COMMIT was lost.
            named: dict[str, Any] = {"seconds": seconds, "by": (by := settlement.successor(lease)), "waits": False}
            extend = partial(settlement.extend, schema=self._tables.schema, lease=lease, **named)
            if await self._settle(extend) is None:
                raise Refused(WireCode.INVALID_RECEIPT_HANDLE, _EXPIRED)
            self.renewals.drop(lease)
            handle = by.handle
        if seconds < _LEAST_POLLING:
            asyncio.get_running_loop().call_later(seconds, self.wake, topic)
        return handle

    async def _fail(self, lease: MessageLease, failure: HandlerFailure) -> None:
        of_group = self._group(lease.group, topic_of(lease.topic)).subscription
        settings = self._tables.settings
        fail = partial(settlement.fail, of_group=of_group, settings=settings, lease=lease, failure=failure, waits=False)
        outcome = await self._settle(fail)
        self.renewals.drop(lease)
        if outcome is Settlement.LATE:
            raise Refused(WireCode.INVALID_RECEIPT_HANDLE, _EXPIRED)

    async def _settle(self, work: Callable[[Connection], T]) -> T:
        """Do work on the row of a lease; where another transaction has it, again in a moment, which costs no thread.

        Raises:
            Refused: that lasts longer; the client may try again.
        """
        for pause in _AGAIN:
            with suppress(RowHeld):  # tried again below
                return await self._tables.run(work)
            await asyncio.sleep(pause)
        try:
            return await self._tables.run(work)
        except RowHeld:
            raise Refused(WireCode.TOO_MANY_REQUESTS, _HELD) from None

    async def forward_to_dead_letters(self, request: Any, client: Client) -> Any:
        """Park a message: its client has tried it as often as it may.

        A lease that has ended is answered with OK too: clients would repeat the call for ever, and the message is in
        other hands, or parked by the same call before.
        """
        group, topic = self._pair(request, client)
        of_all = f"{request.delivery_attempt} of {request.max_delivery_attempts} attempts"
        reason = f"client {client.id} gave up after {of_all}"
        text = ""
        try:
            await self._fail(lease_of(request.receipt_handle, group, topic), HandlerFailure(reason, Status.PARKED))
        except Refused as refused:
            if str(refused) != _EXPIRED:
                raise
            text = "nothing was done: " + _EXPIRED
        self.wake(topic)
        return new("ForwardMessageToDeadLetterQueueResponse", status=status_of(WireCode.OK, text))

    async def terminated(self, request: Any, client: Client) -> Any:
        """Forget a client that ends; what it has taken is due again in a second."""
        self._clients.leave(client)
        group = client.name_of(request.group) or client.group or ""
        # By its settings too: a group that was idle may be forgotten here.
        topics = {topic for of_group, topic in self._groups if of_group == group} | client.topics
        for topic in sorted(topics):
            if client.user.may_receive(topic, group):
                known, schema = self._groups.get((group, topic)), self._tables.schema
                feed = topic if known is None else known.subscription.feed
                # What a server renews ends soon by itself; what ends later has been extended, in SQL.
                longest = LONGEST_LEASE if client.kind == SIMPLE_CONSUMER else RENEWED
                of = partial(settlement.give_up, schema=schema, group=group, topic=feed)
                give_up = partial(of, taker=client.taker, longest=longest)
                await self._tables.run(give_up)
                asyncio.get_running_loop().call_later(1.0, self.wake, topic)
        return new("NotifyClientTerminationResponse", status=status_of(WireCode.OK))


def _take_id(request: Any, client: Client, filter_name: str) -> str:
    """Return the name of a take: an attempt id is one of a client; by another filter or batch size it is a new take."""
    parts = request.attempt_id, client.taker, filter_name, str(request.batch_size)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _polling(request: Any, remaining: float | None) -> float:
    """Return for how long (seconds) a receive may wait."""
    left = 60.0 if remaining is None else remaining
    if left < _LEAST_POLLING:
        text = "The deadline time remaining is not enough for polling, please check network condition"
        raise Refused(WireCode.ILLEGAL_POLLING_TIME, text)
    polling = millis(request.long_polling_timeout) / 1000 if request.HasField("long_polling_timeout") else POLLING
    return min(max(polling, _LEAST_POLLING), POLLING, left - _MARGIN)
