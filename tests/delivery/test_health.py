"""What is wrong with deliveries is told: as findings of the health rules, in the worker's report, and as metrics."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy.orm import Session

from outbox import Delivery, Outbox
from outbox.delivery.confirm_pass import ConfirmReport
from outbox.message.notice import DELIVERED, notice_group
from outbox.operator.health.overview import Overview
from outbox.operator.health.rules import Diagnosis, Severity
from outbox.telemetry.hooks import add_hook
from outbox.telemetry.prometheus import Meter
from tests.delivery.support import Post
from tests.doctor.support import examine
from tests.operator.health import DUTIES, overview_of, report, sql


def found(post: Post) -> list[Diagnosis]:
    """Return the findings about deliveries; the doctor has the same as the overview."""
    overview = overview_of(bank=post.producer)
    findings = [each for each in overview.findings if "deliver" in each.code or each.details.get("duty") == "confirm"]
    examined = [each.code for each in examine(post.producer, post.settings).findings]
    assert {each.code for each in findings} <= set(examined)
    return findings


def exhausted(overview: Overview) -> int:
    """Return how many messages of all topics are given up."""
    return sum(topic.exhausted or 0 for topic in overview.topics)


def worker(post: Post, facts: Mapping[str, Any] | None = None, *, number: int = 1) -> None:
    """Have a worker report that it confirms, with what its passes came to."""
    now = dt.datetime.now(dt.UTC).isoformat()
    report(post.producer, [*DUTIES, "confirm"], number=number, health={"last_success": now, **(facts or {})})


def test_exhausted(post: Post) -> None:
    """What isn't sent again is found, until the group has it after all."""
    worker(post)
    half_id, _ = post.send(1, 2)
    post.consume(post.declare())
    post.lose(half_id)
    settings = post.with_resends(0)
    post.confirm(settings=settings)
    assert post.fates()[half_id] == ["resend_exhausted"]
    (problem,) = found(post)
    assert problem.sentence.startswith(
        f"1 message of topic 't' was sent again as often as the settings say, and isn't in the inbox of a known group; "
        f"the first ({half_id}, in group 'g') for "
    )
    assert (problem.code, problem.severity) == ("delivery.exhausted", Severity.PROBLEM)
    assert (problem.page, problem.query["status"]) == ("messages", "resend_exhausted")
    assert exhausted(overview_of(bank=post.producer)) == 1
    # The mend: an operator sends it again.
    post.knowing.operator.resend(half_id, by="ada", why="the inbox is mended")
    post.consume(post.declare())
    post.confirm(settings=settings)
    assert post.fates()[half_id][-1] == "consumed"
    assert (found(post), exhausted(overview_of(bank=post.producer))) == ([], 0)


def test_a_group_that_can_not_be_asked(post: Post) -> None:
    """From the second pass in a row on it is found; when it answers, it is forgotten."""
    gone = post.consumer.url.set(port=1).render_as_string(hide_password=False)
    app, told = post.know(consumer=gone), ConfirmReport()
    for passes in (1, 2):
        post.confirm(app, report=told)
        worker(post, told.facts())
        assert [each.details["passes"] for each in found(post)] == [passes][passes < 2 :]
    worker(post, told.facts(), number=2)
    (problem,) = found(post)
    assert problem.sentence.startswith(
        "Group 'g' of topic 't' can't be asked what became of its messages, for 2 passes in a row: database "
    )
    post.confirm(report=told)
    assert (told.unreachable, told.passes) == ({}, 3)


def test_a_callback_that_fails(post: Post) -> None:
    """It is a handler that fails: what is parked of its group is found, and counted, like that of any other."""
    app, meter = post.know(), Meter(CollectorRegistry())
    group = notice_group(app.group, "t")
    app.on_delivered("t")(refuse_fate)
    (half_id,) = post.send(1)
    post.consume(post.declare())
    unhook = add_hook(meter)
    try:
        with post.producer.connect() as connection:
            confirmed = ConfirmReport()
            post.confirm_on(connection, app, report=confirmed)
        subscription = app.subscriptions[DELIVERED, group]
        app.subscriptions[DELIVERED, group] = replace(subscription, retry_delays=())
        post.call(app)
    finally:
        unhook()
    (problem,) = (each for each in overview_of(bank=post.producer).findings if each.code == "message.parked")
    assert problem.details["group"] == group
    labels = {"topic": DELIVERED, "group": group, "outcome": "parked"}
    assert meter.registry.get_sample_value("outbox_handled_total", labels) == 1
    facts = confirmed.facts()
    assert (facts["passes"], facts["confirmed"]) == (1, 1)
    assert post.settled(half_id)


def refuse_fate(delivery: Delivery, session: Session) -> None:
    """Fail, as bank A does for an account that isn't there."""
    raise ValueError("no such account")


def test_nobody_confirms(post: Post) -> None:
    """A known group that no living worker asks about, with the SQL that forgets it."""
    post.send(1)
    post.consume(post.declare())
    post.confirm()
    report(post.producer)
    (note,) = found(post)
    assert (note.code, note.severity) == ("duty.missing", Severity.NOTE)
    assert note.sentence == (
        "No living worker asks what became of the messages of topic 't' in group 'g', which is known in database "
        "'bank'."
    )
    post.at_a.run(note.mend.partition("for good: ")[2])
    assert found(post) == []


def test_a_pass_that_does_not_end(post: Post) -> None:
    """A worker whose last pass ended long ago, or that never ended one."""
    long_ago = (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=660)).isoformat()
    worker(post, {"last_success": long_ago})
    (problem,) = found(post)
    assert problem.sentence.startswith("Worker host:1 has not ended a pass that confirms deliveries for 11m")
    worker(post, {"last_success": None})
    assert found(post) == []
    sql(post.producer, "UPDATE outbox.worker SET started_at = started_at - interval '11 minutes'")
    assert [each.code for each in found(post)] == ["delivery.late"]


def shouting(app: Outbox) -> Outbox:
    """Give an Outbox a codec, for bodies in capitals."""
    app.codec("application/x-shout", encode=lambda body: body.upper().encode(), decode=lambda raw: raw.decode())
    return app


@pytest.mark.parametrize("encoding", ["plain", "compressed", "codec"])
def test_callbacks_get_the_body_as_it_was_sent(post: Post, encoding: str) -> None:
    """However it is stored: compressed, or in a format of a codec's."""
    app, bodies = shouting(post.know()), []
    app.on_delivered("t")(lambda delivery, session: bodies.append(delivery.message.body))
    settings = post.with_compression(1000 if encoding == "compressed" else 0)
    sender, body = shouting(Outbox(post.producer, settings=settings)), "x" * 5000
    with post.producer.begin() as connection:
        if encoding == "codec":
            sender.send(connection, "t", body, content_type="application/x-shout")
        else:
            sender.send(connection, "t", body)
    post.dispatch()
    post.consume(post.declare())
    post.confirm(app)
    assert bodies == [body.upper() if encoding == "codec" else body]
