"""Tell clients where to go and how to behave: routes, assignments, settings; and hear that they live.

Every client dials what its route says, so a route echoes the address that the client has asked by: behind a balancer,
a port that is forwarded or with TLS it is the one that works. Settings are always answered, with the fields without
which a client starts and never receives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from outbox.rocketmq.clients import Client, Clients, CommandStream
from outbox.rocketmq.options import TopicType, must
from outbox.rocketmq.rules import MAX_BODY, TYPES, Refused, check_bounds
from outbox.rocketmq.tables import Tables
from outbox.rocketmq.wire import WIRE, WireCode, new, status_of, time_fields
from outbox.telemetry.events import ClientRefused
from outbox.telemetry.hooks import emit

#: How many messages a push consumer asks for at once, and for how long (seconds) a poll may wait.
BATCH, POLLING = 32, 20
#: So many bytes a client's settings may have: a thousand topics, each with a filter.
_MOST_BYTES = 1024 * 1024
_BROKER = "outbox"
_READ_WRITE = WIRE.enums["Permission"]["READ_WRITE"]
_MIXED = ("NORMAL", "FIFO", "DELAY", "TRANSACTION")
#: How often a producer tries to send, and its pauses.
_PRODUCER_BACKOFF = {
    "max_attempts": 3,
    "exponential_backoff": {"initial": time_fields(10), "max": time_fields(1_000), "multiplier": 2.0},
}


class NoSettings(Exception):
    """Settings of neither a producer nor a consumer: the stream ends with INVALID_ARGUMENT, as at the proxy.

    So it does for a command that is too large.
    """

    def __init__(self, text: str = "there is no publishing or subscription data in settings") -> None:
        super().__init__(text)


def accepted(kind: TopicType) -> list[int]:
    """Return the numbers of the message types that a topic of a kind takes."""
    return [TYPES[name] for name in (_MIXED if kind == "MIXED" else (kind,))]


class Routes:
    """The calls by which clients find their way."""

    def __init__(self, tables: Tables, clients: Clients) -> None:
        self._tables = tables
        self._clients = clients

    async def query_route(self, request: Any, client: Client) -> Any:
        """Answer with the queues of a topic, all at the address that was asked."""
        topic = client.topic_of(request.topic)
        must(client.user.may_see(topic), f"know of topic {topic}")
        queues = [self._queue(topic, number, request) for number in range(await self._tables.queues(topic))]
        return new("QueryRouteResponse", status=status_of(WireCode.OK), message_queues=queues)

    async def query_assignment(self, request: Any, client: Client) -> Any:
        """Answer with one queue that stands for all; for a group that keeps the order of keys, with each."""
        group, topic = client.pair_of(request.group, request.topic)
        queues = await self._tables.queues(topic)
        numbers = range(queues) if self._tables.options.group(group).fifo else [-1]
        assignments = [{"message_queue": self._queue(topic, number, request)} for number in numbers]
        return new("QueryAssignmentResponse", status=status_of(WireCode.OK), assignments=assignments)

    def _queue(self, topic: str, number: int, request: Any) -> Any:
        return new(
            "MessageQueue",
            topic=request.topic,
            id=number,
            permission=_READ_WRITE,
            broker={"name": _BROKER, "id": 0, "endpoints": request.endpoints},
            accept_message_types=accepted(self._tables.options.topic(topic).type),
        )

    async def heartbeat(self, request: Any, client: Client) -> Any:
        """Note that a client lives; also one whose settings aren't known here, such as after a restart."""
        group = client.group_of(request.group) if client.name_of(request.group) else None
        client.kind = client.kind or request.client_type
        client.group = client.group or group
        return new("HeartbeatResponse", status=status_of(WireCode.OK))

    # --- telemetry -----------------------------------------------------------------------------------------------

    async def hear(self, commands: AsyncIterator[Any], client: Client, stream: CommandStream) -> None:
        """Answer the commands of a client's telemetry stream until it ends its half.

        Raises:
            NoSettings: its settings are neither a producer's nor a consumer's, or a command is too large.
        """
        async for command in commands:
            if (size := command.ByteSize()) > _MOST_BYTES:
                raise NoSettings(f"a command of {size} bytes is too large, max is {_MOST_BYTES}")
            try:
                check_bounds(command)
            except Refused as refused:
                raise NoSettings(str(refused)) from None
            client = self._clients.heard(client.id, client.user, {}, client.host)
            self._clients.spoke(client, stream)
            if command.HasField("settings"):
                status = status_of(WireCode.OK)
                try:
                    self._clients.settle(client, command.settings)
                except Refused as refused:
                    if refused.code is WireCode.FORBIDDEN:
                        emit(ClientRefused(call="Telemetry", client=client.id, reason=str(refused)))
                    status = status_of(refused.code, str(refused))
                answer = self.merged(command.settings, client)
                stream.put(new("TelemetryCommand", status=status, settings=answer))
                await asyncio.sleep(0)  # it is put by the loop
                await stream.sent()

    def merged(self, sent: Any, client: Client) -> Any:
        """Return a client's settings with what the server says of them.

        Of a group that isn't its user's they are as of any: a client starts by them, and each receive is refused.
        """
        settings = type(sent).FromString(sent.SerializeToString())
        settings.metric.on = False
        if settings.HasField("publishing"):
            settings.backoff_policy.CopyFrom(new("RetryPolicy", **_PRODUCER_BACKOFF))
            settings.publishing.max_body_size = min(MAX_BODY, self._tables.settings.max_body_bytes)
            settings.publishing.validate_message_type = True
        elif settings.HasField("subscription"):
            group = self._tables.options.group(client.group or "")
            pauses = [time_fields(int(seconds * 1000)) for seconds in group.retry_delays]
            backoff = {"max_attempts": group.max_attempts, "customized_backoff": {"next": pauses}}
            settings.backoff_policy.CopyFrom(new("RetryPolicy", **backoff))
            settings.subscription.fifo = group.fifo
            settings.subscription.receive_batch_size = BATCH
            settings.subscription.long_polling_timeout.seconds = POLLING
            settings.subscription.long_polling_timeout.nanos = 0
        else:
            raise NoSettings
        return settings
