"""RabbitMQ: what no queue takes, and an exchange that isn't there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import aio_pika
import pytest

from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.errors import InvalidHandler
from outbox.relay.rabbit import RabbitPublisher
from tests.consumer.test_control import control
from tests.kit.bench import Bench
from tests.relay.targets import RabbitTarget, run

Relaying = Callable[..., OutsideConsumer]


@pytest.fixture(scope="module")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server for this file."""
    with RabbitTarget.serve(tmp_path_factory.mktemp("rabbit")) as server:
        yield server


@pytest.fixture
def target(rabbit: Any) -> RabbitTarget:
    """A queue of the test's own."""
    return RabbitTarget(rabbit)


def test_what_no_queue_takes_is_parked_while_others_are_routed(
    bench: Bench, relaying: Relaying, target: RabbitTarget
) -> None:
    """It isn't taken for published."""
    publisher = RabbitPublisher(target.url, routing_key=lambda message: target.destination + (message.tag or ""))
    routed = bench.send(1)
    consumer = relaying(publisher)
    bench.consume(consumer)
    lost = bench.send(2, tag="-nowhere")
    bench.send(3)
    bench.consume(consumer)
    assert bench.inbox()[routed[0]].status == "consumed"
    assert bench.inbox()[lost[0]].status == "parked"
    assert "no queue takes" in str(bench.inbox()[lost[0]].error)
    assert [each.value for each in target.read()] == [1, 3]


@pytest.mark.parametrize("options", [{"routing_key": "nowhere"}, {"exchange": "nowhere"}])
def test_where_nothing_is_routed_no_message_pays(
    bench: Bench, relaying: Relaying, target: RabbitTarget, options: dict[str, Any]
) -> None:
    """A queue or an exchange that isn't there yet isn't the messages' fault."""
    bench.send(*range(20), key=None)
    assert not bench.consume(relaying(RabbitPublisher(target.url, **options))).done
    assert bench.statuses() == []
    assert "nowhere" in control(bench).because


def test_a_full_queue(bench: Bench, relaying: Relaying, target: RabbitTarget) -> None:
    """One that refuses publishes when it is full answers with a nack."""

    async def declare() -> None:
        async with await aio_pika.connect(target.url) as connection:
            arguments: Any = {"x-max-length": 2, "x-overflow": "reject-publish"}
            await (await connection.channel()).declare_queue("full", arguments=arguments)

    run(declare())
    bench.send(*range(5), key="k")
    bench.consume(relaying(RabbitPublisher(target.url, routing_key="full")))
    assert bench.statuses() == [("consumed", 1)] * 2
    assert "refused" in control(bench).because


def test_a_url_that_is_none() -> None:
    """It isn't quoted: it may have a password."""
    with pytest.raises(InvalidHandler) as refused:
        RabbitPublisher("http://u:secret@x")
    assert "secret" not in str(refused.value)
