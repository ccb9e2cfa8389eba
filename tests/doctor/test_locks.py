"""A lock that one transaction keeps from all other workers."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.consumer.consumer import Consumer
from outbox.database.sql import GroupQueue
from outbox.dispatch.dispatch_pass import dispatch_lock, dispatch_once
from outbox.operator.health.rules import Severity, Thresholds
from tests.doctor.support import codes, examine, mend_by_command, raw, the

AT_ONCE = Thresholds(lock=0)


def test_dispatch_is_held(engine: Engine, outbox: Outbox) -> None:
    """Whoever keeps dispatch from all workers is named, with the command that ends it; then others dispatch."""
    with engine.begin() as connection:
        outbox.send(connection, "orders", {})
    with closing(raw(engine.url, application_name="gone")) as holder, engine.connect() as connection:
        holder.execute("SELECT pg_advisory_xact_lock(%s)", (dispatch_lock("outbox"),))
        assert codes(examine(engine, outbox.settings)) == []
        assert dispatch_once(connection, outbox.settings).done == 0
        finding = the(examine(engine, outbox.settings, thresholds=AT_ONCE), "lock.held")
        assert (finding.details["lock"], finding.severity) == ("dispatch", Severity.PROBLEM)
        assert finding.details["pid"] == holder.info.backend_pid
        assert "application 'gone', client 127.0.0.1:" in finding.sentence
        line, *_ = finding.mend.splitlines()
        assert mend_by_command(engine, line.replace("…", "gone"), "--yes").code == 0
        assert "lock.held" not in codes(examine(engine, outbox.settings, thresholds=AT_ONCE))
        assert dispatch_once(connection, outbox.settings).done == 1


@pytest.mark.parametrize("topic", ["orders", "orders.created"])
def test_a_queue_is_held(engine: Engine, outbox: Outbox, topic: str) -> None:
    """A queue's lock is named by group, topic and queue, as a note: a handler may take its time."""

    @outbox.consumer(topic, group="till")
    def handle(message: Any, session: Any) -> None:
        pass

    outbox.declare_topic(topic, 2)
    with engine.connect() as connection:
        Consumer(outbox.subscriptions[topic, "till"], outbox.settings).start(connection, connection)
    with closing(raw(engine.url)) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(%s)", (GroupQueue("outbox", "till", topic, 1).lock,))
        finding = the(examine(engine, outbox.settings, thresholds=AT_ONCE), "lock.held")
        assert finding.details["lock"] == f"queue 1 of topic {topic!r} in group 'till'"
        assert finding.severity is Severity.NOTE
