"""A handler that hangs keeps its own queue, and nothing else."""

from __future__ import annotations

import threading
from typing import Any

from outbox import Message
from tests.kit import wait_until
from tests.worker.conftest import Bench

HANDLED = "SELECT count(*) FROM outbox.consumer_message WHERE consumer_group = :group"
IN_FLIGHT = """
SELECT d.value -> 'handler' ->> 'in_flight' FROM outbox.worker, jsonb_each(duties) d
 WHERE d.value -> 'handler' ->> 'group' = 'mail'
"""


def test_others_go_on_while_a_handler_hangs(bench: Bench) -> None:
    """Another worker handles the other queues of the group, the same worker the other groups; the report shows it."""
    hangs, goes_on = threading.Event(), threading.Event()
    bench.outbox.declare_topic("paid", 2)

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> None:
        bench.handle(message, session)
        if message.queue == 0 and not hangs.is_set():
            hangs.set()
            goes_on.wait(60)

    @bench.outbox.consumer("paid", group="audit")
    def note(message: Message, session: Any) -> None:
        pass

    def handled(group: str) -> Any:
        (count,) = bench.rows(HANDLED, group=group)
        return count

    workers = [bench.work()]
    try:
        first = bench.send(queue=0)
        wait_until(hangs.is_set, "the handler hangs")
        workers.append(bench.work())
        others = bench.send(queue=1, count=3)
        wait_until(lambda: handled("mail") == 3, "the other worker handles the other queue")
        wait_until(lambda: handled("audit") == 4, "the other group has handled all")
        wait_until(lambda: sorted(bench.rows(IN_FLIGHT)) == ["0", "1"], "the hanging one is reported")
        assert sorted(bench.effects()) == sorted(others)
    finally:
        goes_on.set()
    wait_until(lambda: sorted(bench.effects()) == sorted(first + others), "it has ended, and all took effect once")
    wait_until(lambda: bench.rows(IN_FLIGHT) == ["0", "0"], "nothing is in flight any more")
