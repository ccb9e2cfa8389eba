"""Messages that are taken: seen by one taker at a time, settled under their lease, handed out again when it ends."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Worker
from outbox.compensate.compensation import Postponed
from outbox.compensate.quarantine import QuarantineOrder, quarantine, release
from outbox.consumer.leased import sql
from outbox.errors import InvalidHandler, InvalidMessage, LeaseEnded, MessagesPruned, TransactionRequired
from outbox.leases import LeasedGroup, LeasedMessage
from outbox.message.content import EXPIRES_HEADER
from outbox.message.model import Status
from outbox.operator.health.stats import stats
from outbox.operator.model import InboxFilter, PageRequest
from outbox.telemetry.events import MessageFailed, MessageParked, MessagesHandled
from outbox.telemetry.hooks import TelemetryEvent
from outbox.testing import drain
from tests.kit.bench import Bench
from tests.kit.passes import consume_all
from tests.kit.waiting import wait_until


def leased(bench: Bench, **options: Any) -> LeasedGroup[Any]:
    """Declare group `g` of topic `t` on the consumer's side."""
    app = Outbox(bench.consumer, settings=bench.settings)
    source = None if bench.producer is bench.consumer else bench.producer
    options = {"group": "g", "source": source, "retry_delays": (60.0, 60.0), **options}
    return app.leased(options.pop("topic", "t"), **options)


def bodies(taken: list[LeasedMessage[Any]]) -> list[Any]:
    """Return the bodies, in the order in which they were handed out."""
    return [each.body for each in taken]


def end_leases(bench: Bench) -> None:
    """Have all leases and delays end."""
    with bench.consumer.begin() as connection:
        connection.execute(
            text(
                "UPDATE outbox.consumer_message SET next_attempt_at = clock_timestamp() - interval '2 s'"
                " WHERE next_attempt_at IS NOT NULL"
            )
        )


def test_a_message_is_taken_once_and_acknowledged(any_bench: Bench) -> None:
    """A message is taken once and acknowledged."""
    group = leased(any_bench)
    ids = any_bench.send("a", "b", "c")
    first, second = group.take(2), group.take(2)
    assert sorted(bodies(first + second)) == ["a", "b", "c"]
    assert group.take(5) == []
    assert {row.status for row in any_bench.inbox().values()} == {"taken"}
    assert all(each.acknowledge() for each in first + second)
    assert any_bench.statuses() == [("consumed", 1)] * 3
    assert {each.message.id for each in first + second} == set(ids)
    end_leases(any_bench)
    assert group.take(5) == []


def test_what_is_not_settled_is_handed_out_again(any_bench: Bench, heard: list[TelemetryEvent]) -> None:
    """What is not settled is handed out again."""
    group = leased(any_bench)
    any_bench.send("a")
    (first,) = group.take()
    end_leases(any_bench)
    (second,) = group.take()
    assert (first.attempt, second.attempt, second.message.attempt) == (1, 2, 2)
    with pytest.raises(LeaseEnded, match="can't be acknowledged by group 'g'"):
        first.acknowledge()
    assert second.acknowledge()
    assert any_bench.statuses() == [("consumed", 2)]
    assert [type(event) for event in heard if isinstance(event, MessageFailed | MessagesHandled)] == [
        MessageFailed,
        MessagesHandled,
    ]


def test_an_acknowledgement_given_twice_counts_once(bench: Bench, heard: list[TelemetryEvent]) -> None:
    """An acknowledgement given twice counts once."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take()
    assert (taken.acknowledge(), taken.acknowledge()) == (True, False)
    assert len([event for event in heard if isinstance(event, MessagesHandled)]) == 1


def test_no_word_counts_after_the_lease(bench: Bench) -> None:
    """No word counts after the lease."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take()
    end_leases(bench)
    before = bench.inbox()
    for act in (
        taken.acknowledge,
        lambda: taken.extend(60),
        lambda: taken.fail("ill"),
        lambda: taken.fail("", park=True),
    ):
        with pytest.raises(LeaseEnded):
            act()
    assert bench.inbox() == before


def test_acknowledged_with_the_change_its_effect_is_once(bench: Bench) -> None:
    """Acknowledged with the change its effect is once."""
    group = leased(bench)
    bench.send("a")
    (late,) = group.take()
    end_leases(bench)
    (taken,) = group.take()
    for each in (late, taken):
        with Session(bench.consumer) as session:
            session.execute(
                text("INSERT INTO ledger (message_id, body, attempt) VALUES (:id, :body, 1)"),
                {"id": each.message.id, "body": each.body},
            )
            if each is late:
                with pytest.raises(LeaseEnded):
                    each.acknowledge(session)
                session.rollback()
            else:
                assert each.acknowledge(session)
                session.commit()
    assert bench.ledger() == ["a"]
    assert bench.statuses() == [("consumed", 2)]


def test_a_change_that_rolls_back_takes_its_acknowledgement_along(bench: Bench) -> None:
    """A change that rolls back takes its acknowledgement along."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take()
    with Session(bench.consumer) as session:
        assert taken.acknowledge(session)
        session.rollback()
    assert bench.statuses() == [("taken", 0)]
    assert taken.acknowledge()


def test_carriers_that_cannot_take_it_are_refused(bench: Bench) -> None:
    """Carriers that cannot take it are refused."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take()
    plain = bench.consumer.execution_options(isolation_level="AUTOCOMMIT")
    with plain.connect() as connection, pytest.raises(TransactionRequired, match="AUTOCOMMIT"):
        taken.acknowledge(connection)
    assert taken.acknowledge()


def test_a_lease_is_extended_under_a_new_number(bench: Bench) -> None:
    """A lease is extended under a new number."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take(invisible=5)
    before, until = taken._lease, taken.until
    taken.extend(dt.timedelta(hours=1))
    assert taken.until > until + dt.timedelta(minutes=50)
    assert taken._lease.number != before.number
    taken.extend(0)
    (again,) = group.take()
    assert again.attempt == 2
    assert again.acknowledge()


def test_failures_follow_the_table_and_park_at_its_end(any_bench: Bench, heard: list[TelemetryEvent]) -> None:
    """Failures follow the table and park at its end."""
    group = leased(any_bench, retry_delays=(60.0,))
    any_bench.send("a")
    (taken,) = group.take()
    taken.fail("ill")
    assert group.take() == []
    assert any_bench.statuses() == [("failed", 1)]
    end_leases(any_bench)
    (taken,) = group.take()
    assert (taken.attempt, taken.message.first_failed_at is not None) == (2, True)
    taken.fail("ill again")
    assert any_bench.statuses() == [("parked", 2)]
    kinds = [type(event) for event in heard if isinstance(event, MessageFailed | MessageParked)]
    assert kinds == [MessageFailed, MessageParked]
    history = any_bench.rows("SELECT error FROM outbox.attempt_history ORDER BY failed_at")
    assert history == ["ill", "ill again"]


def test_a_failure_may_name_its_delay_or_park(bench: Bench) -> None:
    """A failure may name its delay or park."""
    group = leased(bench)
    bench.send("a", "b")
    one, other = group.take(2)
    one.fail("at once", delay=0)
    other.fail("no use", park=True)
    assert sorted(status for status, _ in bench.statuses()) == ["failed", "parked"]
    (again,) = group.take(2)
    assert (again.message.id, again.attempt) == (one.message.id, 2)


def test_a_message_that_is_never_settled_is_parked(bench: Bench) -> None:
    """A message that is never settled is parked."""
    group = leased(bench, retry_delays=(1.0,))
    bench.send("a")
    for attempt in (1, 2):
        (taken,) = group.take()
        assert taken.attempt == attempt
        end_leases(bench)
    assert group.take() == []
    (row,) = bench.inbox().values()
    assert (row.status, row.attempts, row.error) == ("parked", 2, "taken, and not settled before the lease ended")
    errors = bench.rows("SELECT error FROM outbox.attempt_history")
    assert len(errors) == 2


def test_the_callback_hears_of_what_was_parked(any_bench: Bench) -> None:
    """The callback hears of what was parked."""
    bench = any_bench
    app = Outbox(bench.consumer, settings=bench.settings)
    app.on_parked("t")(lambda letter, session: None)
    group = app.leased(
        "t", group="g", retry_delays=(60.0,), source=None if bench.producer is bench.consumer else bench.producer
    )
    bench.send("a", "b")
    one, other = group.take(2)
    one.fail("no use", park=True)
    end_leases(bench)
    assert [each.message.id for each in group.take()] == [other.message.id]
    end_leases(bench)
    assert group.take() == []
    notices = bench.rows("SELECT headers ->> 'outbox-notice' FROM outbox.half_message WHERE topic LIKE 'outbox.%'")
    assert sorted(json.loads(each)["reason"] for each in notices) == ["no use", sql.LAPSED]
    bodies_told = bench.rows("SELECT convert_from(body, 'UTF8') FROM outbox.half_message WHERE topic LIKE 'outbox.%'")
    assert sorted(bodies_told) == ["a", "b"]


def test_a_key_is_held_by_what_is_taken_of_it(any_bench: Bench) -> None:
    """A key is held by what is taken of it."""
    group = leased(any_bench, ordered="key")
    any_bench.send("a1", key="a")
    any_bench.send("b1", key="b")
    (first,) = [each for each in group.take(10) if each.message.key == "a"]
    any_bench.send("a2", "a3", key="a")
    any_bench.send("b2", key="b")
    assert group.take(10) == []
    assert sorted(status for status, _ in any_bench.statuses()) == ["taken", "taken", "waiting", "waiting", "waiting"]
    first.acknowledge()
    (second,) = group.take()
    assert second.body == "a2"
    second.fail("ill", delay=3600)
    assert group.take(10) == []
    end_leases(any_bench)
    again = {each.body: each for each in group.take(10)}
    assert set(again) == {"a2", "b1"}
    again["a2"].acknowledge()
    assert bodies(group.take(10)) == ["a3"]


def test_what_one_take_reads_of_a_key_comes_together_in_order(bench: Bench) -> None:
    """What one take reads of a key comes together in order."""
    group = leased(bench, ordered="key")
    bench.send("1", "2", "3", "4")
    taken = group.take(3)
    assert bodies(taken) == ["1", "2", "3"]
    assert group.take(3) == []
    end_leases(bench)
    # Handed out again one by one: the first is the one that may run.
    assert bodies(group.take(3)) == ["1"]


def test_what_waited_for_a_key_comes_together_in_order(any_bench: Bench) -> None:
    """What waited for a key comes together in order, as far as it was never handed out, and as many as are taken."""
    group = leased(any_bench, ordered="key")
    any_bench.send("a1", key="a")
    (first,) = group.take(10)
    any_bench.send("a2", "a3", "a4", "a5", key="a")
    assert group.take(10) == []
    first.acknowledge()
    second, third, fourth = group.take(3, take_id="x")
    assert bodies([second, third, fourth]) == ["a2", "a3", "a4"]
    assert bodies(group.take(3, take_id="x")) == ["a2", "a3", "a4"]
    assert group.take(3) == []
    end_leases(any_bench)
    # What is tried again comes alone: the next of its key may only run when it is done.
    (second,) = group.take(3)
    assert (second.body, second.attempt) == ("a2", 2)
    second.acknowledge()
    assert bodies(group.take(3)) == ["a3"]


def test_a_small_take_comes_past_a_backlog_that_waits(bench: Bench) -> None:
    """What is held back, or isn't for the client, doesn't hide what lies behind it from a take of one."""
    bench.app.declare_topic("t", 1)
    group = leased(bench, ordered="key")
    bench.send("a0", key="a")
    (held,) = group.take()
    bench.send(*(f"a{number}" for number in range(1, 100)), key="a")
    bench.send("b", "c", key="b")
    assert bodies(group.take()) == ["b"]
    assert bodies(group.take(5)) == []
    held.acknowledge()
    assert len(group.take(1000)) == 99
    other = leased(bench, group="h")
    with other._connections() as (connection, source):
        named = {"invisible": 60.0, "accepts": lambda message: message.body in {"b", "c"}}
        assert [each.message.body for each in other.take_on(connection, source, 1, **named)] == ["b"]


def test_an_act_on_one_that_waits_keeps_those_behind_it_back(bench: Bench) -> None:
    """While an operator's transaction has a message, those of its key behind it aren't handed out before it."""
    group = leased(bench, ordered="key")
    bench.send("1")
    (first,) = group.take()
    bench.send("2", "3", "4")
    assert group.take(5) == []
    first.acknowledge()
    with bench.consumer.connect() as operator:
        operator.execute(text("SELECT FROM outbox.consumer_message WHERE status = 'waiting' AND turn = 3 FOR UPDATE"))
        assert operator.execute(text("SELECT count(*) FROM outbox.consumer_message WHERE turn = 3")).scalar() == 1
        (second,) = group.take(5)
        assert second.body == "2"
    second.acknowledge()
    assert bodies(group.take(5)) == ["3", "4"]


@pytest.mark.parametrize(("rule", "left"), [("park", []), ("skip", ["2"]), ("park_sequence", [])])
def test_what_follows_a_parked_one_goes_by_the_groups_rule(bench: Bench, rule: Any, left: list[str]) -> None:
    """What follows a parked one goes by the groups rule."""
    group = leased(bench, ordered="key", on_exhausted=rule)
    bench.send("1")
    (first,) = group.take(1)
    bench.send("2")
    assert group.take(1) == []
    first.fail("no use", park=True)
    assert bodies(group.take(5)) == left
    statuses = [status for status, _ in bench.statuses()]
    assert statuses == {"park": ["parked", "waiting"], "skip": ["parked", "taken"]}.get(rule, ["parked", "parked"])


def test_a_take_whose_answer_was_lost_has_the_same_again(any_bench: Bench) -> None:
    """A take whose answer was lost has the same again."""
    group = leased(any_bench)
    any_bench.send("a", "b", "c")
    lost = group.take(2, take_id="x")
    again = group.take(2, take_id="x")
    assert sorted(bodies(again)) == sorted(bodies(lost))
    assert [each.attempt for each in again] == [1, 1]
    with pytest.raises(LeaseEnded):
        lost[0].acknowledge()
    assert all(each.acknowledge() for each in again)
    assert len(group.take(2, take_id="x")) == 1


def test_a_filter_passes_what_it_leaves_out(bench: Bench) -> None:
    """A filter passes what it leaves out."""
    group = leased(bench, tags={"wanted"})
    bench.send("a", tag="other")
    bench.send("b", tag="wanted")
    assert bodies(group.take(5)) == ["b"]
    assert len(bench.inbox()) == 1


def test_what_is_too_old_is_not_handed_out(bench: Bench) -> None:
    """What is too old is not handed out."""
    group = leased(bench)
    past = dt.datetime.now(dt.UTC) - dt.timedelta(minutes=1)
    bench.send("old", expires_at=past)
    bench.send("new")
    (taken,) = group.take(5)
    assert taken.body == "new"
    assert sorted(status for status, _ in bench.statuses()) == ["expired", "taken"]


def test_what_grows_too_old_while_it_is_retried_is_not_handed_out(bench: Bench) -> None:
    """What grows too old while it is retried is not handed out."""
    group = leased(bench)
    bench.send("a", expires_at=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1))
    (taken,) = group.take()
    taken.fail("ill", delay=0)
    with bench.producer.begin() as connection:
        connection.execute(
            text("UPDATE outbox.half_message SET headers = headers || CAST(:headers AS jsonb)"),
            {"headers": json.dumps({EXPIRES_HEADER: (dt.datetime.now(dt.UTC) - dt.timedelta(minutes=1)).isoformat()})},
        )
    assert group.take() == []
    assert bench.statuses() == [("expired", 1)]


def test_a_paused_group_hands_nothing_out(bench: Bench) -> None:
    """A paused group hands nothing out."""
    group = leased(bench)
    bench.send("a", "b")
    (taken,) = group.take()
    bench.sink.operator.pause_group("g", by="me", why="test")
    assert leased_anew(bench).take() == []
    assert taken.acknowledge()
    bench.sink.operator.resume_group("g", by="me", why="test")
    assert len(leased_anew(bench).take()) == 1


def leased_anew(bench: Bench) -> LeasedGroup[Any]:
    """Return the group as another process has it, which has yet to look at what holds it back."""
    return leased(bench)


def test_a_group_that_was_reset_has_them_again(bench: Bench) -> None:
    """A group that was reset has them again."""
    group = leased(bench)
    bench.send("a", "b")
    for each in group.take(2):
        each.acknowledge()
    bench.sink.operator.reset_group("g", "t", "first", by="me", why="test")
    again = group.take(5)
    assert sorted(bodies(again)) == ["a", "b"]
    assert {each.attempt for each in again} == {1}
    assert all(each.acknowledge() for each in again)
    assert bench.statuses() == [("consumed", 1)] * 2


def test_a_reset_hands_what_had_failed_out_once(bench: Bench) -> None:
    """What is due again when the group is reset is read again, and isn't a retry beside that."""
    group = leased(bench)
    bench.send("a", "b")
    first, _ = group.take(2)
    first.fail("ill", delay=0)
    end_leases(bench)
    bench.sink.operator.reset_group("g", "t", "first", by="me", why="test")
    again = group.take(5)
    assert (sorted(bodies(again)), [each.attempt for each in again]) == (["a", "b"], [1, 1])
    assert all(each.acknowledge() for each in again)


def test_a_reset_keeps_the_order_of_what_is_new_beside_it(bench: Bench) -> None:
    """Messages that are read again come before those that the group hasn't come to yet, also when all leases ended."""
    group = leased(bench, ordered="key")
    bench.send("1", "2")
    assert len(group.take(2)) == 2
    bench.send("3", "4")
    bench.sink.operator.reset_group("g", "t", "first", by="me", why="test")
    assert bodies(group.take(5)) == ["1", "2", "3", "4"]
    end_leases(bench)
    (first,) = group.take(5)
    assert first.body == "1"


def test_a_reset_reads_over_what_is_taken(bench: Bench) -> None:
    """Also where it comes to wait for its key by then: the group goes on, and the lease of before is none."""
    group = leased(bench, ordered="key")
    bench.send("a", "b")
    before = group.take(2)
    bench.sink.operator.reset_group("g", "t", "first", by="me", why="test")
    first, held = group.take(1), group.take(1)
    assert (bodies(first), held) == (["a"], [])
    for each in before:
        with pytest.raises(LeaseEnded):
            each.acknowledge()
    assert first[0].acknowledge()
    (second,) = group.take(2)
    assert (second.body, second.acknowledge()) == ("b", True)
    assert bench.statuses() == [("consumed", 1)] * 2


@pytest.mark.parametrize("transactional", [True, False])
def test_a_handler_that_takes_a_leased_group_over_reads_over_what_is_taken(bench: Bench, transactional: bool) -> None:
    """After a reset it has those too that a client had taken."""
    bench.send("a", "b")
    assert len(leased(bench).take(2)) == 2
    bench.sink.operator.reset_group("g", "t", "first", by="me", why="test")
    got: list[Any] = []
    if transactional:

        @bench.sink.consumer("t", group="g", retry_delays=(60.0,))
        def handle(message: Message, session: Session) -> None:
            got.append(message.body)
            if message.body == "b":
                raise RuntimeError("ill")

    else:

        @bench.sink.consumer("t", group="g", retry_delays=(60.0,), transactional=False)
        def handle_outside(message: Message) -> None:
            got.append(message.body)

    drain(bench.sink)
    assert set(got) == {"a", "b"}
    assert sorted(status for status, _ in bench.statuses()) == ["consumed", "failed" if transactional else "consumed"]


def test_what_has_expired_is_read_over_though_it_is_taken(bench: Bench) -> None:
    """A reset comes to it again while its lease lasts, and it is too old by now."""
    group = leased(bench)
    bench.send("a")
    group.take()
    old = {EXPIRES_HEADER: (dt.datetime.now(dt.UTC) - dt.timedelta(minutes=1)).isoformat()}
    with bench.producer.begin() as connection:
        connection.execute(
            text("UPDATE outbox.half_message SET headers = CAST(:old AS jsonb)"), {"old": json.dumps(old)}
        )
    bench.sink.operator.reset_group("g", "t", "first", by="me", why="test")
    assert group.take() == []
    assert bench.statuses() == [("expired", 0)]


def test_pruned_messages_stop_the_group(bench: Bench) -> None:
    """Pruned messages stop the group."""
    group = leased(bench)
    bench.send("a")
    group.take()[0].acknowledge()
    bench.send("b", "c")
    with bench.producer.begin() as connection:
        connection.execute(text("DELETE FROM outbox.message WHERE position = 2"))
    with pytest.raises(MessagesPruned):
        group.take()


def test_a_message_the_producer_has_no_more_is_parked(bench: Bench) -> None:
    """A message the producer has no more is parked."""
    group = leased(bench)
    (id_,) = bench.send("a")
    (taken,) = group.take()
    taken.fail("ill", delay=0)
    with bench.producer.begin() as connection:
        connection.execute(text("DELETE FROM outbox.message"))
    assert group.take() == []
    assert bench.inbox()[id_].status == "parked"


def test_what_follows_one_that_is_gone_is_given_back(bench: Bench) -> None:
    """Of several that are handed out together, one that its producer has no more holds the later ones back."""
    group = leased(bench, ordered="key")
    bench.send("1")
    (first,) = group.take()
    _, gone, _ = bench.send("2", "3", "4")
    assert group.take(5) == []
    with bench.producer.begin() as connection:
        connection.execute(text("DELETE FROM outbox.half_message WHERE id = :id"), {"id": gone})
    first.acknowledge()
    (second,) = group.take(5)
    assert second.body == "2"
    second.acknowledge()
    assert sorted(bench.statuses()) == [("consumed", 1), ("consumed", 1), ("failed", 0), ("parked", 1)]
    assert group.take(5) == []


def test_a_topic_that_grows_loses_nothing(bench: Bench) -> None:
    """A topic that grows loses nothing."""
    bench.app.declare_topic("t", 1)
    group = leased(bench, ordered="key")
    bench.send("1", "2")
    taken = group.take(1)
    bench.app.declare_topic("t", 4)
    bench.send("3", "4")
    got = bodies(taken)
    for _ in range(8):
        for each in taken:
            each.acknowledge()
        taken = group.take(1)
        got += bodies(taken)
    assert got == ["1", "2", "3", "4"]


def test_a_compensation_waits_for_what_is_taken(bench: Bench) -> None:
    """A compensation waits for what is taken."""
    group = leased(bench)
    (id_,) = bench.send("a")
    (taken,) = group.take()
    queue, position = taken.message.queue, taken.message.position
    order = QuarantineOrder(id_, "t", UUID(int=1), "me", "test", None, ((queue, position),))
    with bench.consumer.connect() as connection:
        with pytest.raises(Postponed):
            quarantine(connection, "outbox", order, acknowledged=False)
        end_leases(bench)
        quarantine(connection, "outbox", order, acknowledged=False)
        assert group.take() == []
        with pytest.raises(LeaseEnded):
            taken.acknowledge()
        release(connection, "outbox", order)
    assert bench.statuses() == [("failed", 0)]
    assert len(group.take()) == 1


def test_the_offset_follows_and_the_lists_know_it(bench: Bench) -> None:
    """The offset follows and the lists know it."""
    group = leased(bench)
    bench.send("a", "b")
    (taken,) = group.take(1, taker="till 7")
    (counted,) = stats(bench.connection, bench.settings, {"producer", "consumer"}).groups
    assert (counted.taken, counted.failed, counted.lag) == (1, 0, 1)
    operator = bench.sink.operator
    rows = operator.inbox(InboxFilter(status=(Status.TAKEN,)), PageRequest()).items
    assert [(row.message_id, row.taken_by) for row in rows] == [(taken.message.id, "till 7")]
    assert operator.message(taken.message.id).next.startswith("taken by till 7 of g until")


@pytest.mark.parametrize(("act", "status"), [("retry", "failed"), ("park", "parked")])
def test_an_operator_takes_it_from_its_client(bench: Bench, act: str, status: str) -> None:
    """An operator takes it from its client, whose word counts no more."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take()
    getattr(bench.sink.operator, act)([taken.message.id], group="g", by="me", why="hangs")
    assert bench.statuses() == [(status, 0)]
    with pytest.raises(LeaseEnded):
        taken.acknowledge()
    assert len(group.take()) == (act == "retry")


def test_workers_serve_the_group_without_handling_it(bench: Bench) -> None:
    """Workers prune what the group has left behind, and handle nothing of it."""
    app = Outbox(bench.consumer, settings=bench.settings)
    group = app.leased("t", group="g")
    bench.send("a")
    with Worker(app) as worker:
        wait_until(lambda: worker.health()["prune t of g"].last_success, "the group is served")
        assert not [name for name in worker.health() if name.startswith(("consume", "retry"))]
        (taken,) = group.take()
    assert drain(app).taken == 0
    assert taken.acknowledge()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ordered": True}, "leased"),
        ({"on_exhausted": "skip"}, "needs ordered='key'"),
        ({"group": "a b"}, "group"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(bench: Bench, options: dict[str, Any], said: str) -> None:
    """A declaration that cannot work is refused."""
    with pytest.raises((InvalidHandler, InvalidMessage), match=said):
        leased(bench, **options)


@pytest.mark.parametrize("most", [0, 1001])
def test_a_take_out_of_range_is_refused(bench: Bench, most: int) -> None:
    """A take out of range is refused."""
    with pytest.raises(InvalidHandler, match="between 1 and 1000"):
        leased(bench).take(most)


@pytest.mark.parametrize("invisible", [-1, 12 * 3600 + 1])
def test_a_lease_out_of_range_is_refused(bench: Bench, invisible: float) -> None:
    """A lease out of range is refused."""
    with pytest.raises(InvalidMessage, match="invisible"):
        leased(bench).take(invisible=invisible)


def test_a_group_has_one_declaration(bench: Bench) -> None:
    """A group has one declaration."""
    app = Outbox(bench.consumer, settings=bench.settings)
    app.leased("t", group="g")
    with pytest.raises(InvalidHandler, match="'g'"):
        app.leased("t", group="g")
    with pytest.raises(InvalidHandler, match="'g'"):
        app.consumer("t", group="g")(lambda message, session: None)


def test_another_group_of_the_topic_has_each_message_too(bench: Bench) -> None:
    """Another group of the topic has each message too."""
    group, consumer = leased(bench, group="taken"), bench.declare()
    bench.send("a", "b")
    consume_all(consumer, bench.connection, bench.source)
    assert sorted(bodies(group.take(5))) == sorted(bench.ledger()) == ["a", "b"]
