"""What the producer learns of its messages: once, in order, and from no answer that isn't true any more."""

from __future__ import annotations

import datetime as dt
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from outbox.delivery.inbox_status import DatabaseInbox, InboxStatus
from outbox.errors import InvalidHandler
from outbox.operator.operator import Operator
from outbox.prune.segments import prune_rows
from tests.delivery.support import Post, refuse, tell
from tests.kit.bench import record


def test_consumed_is_known_and_not_asked_about_again(post: Post) -> None:
    """A message waits until its group has consumed it, and is known by the cursor then: it needs no row."""
    consumer = post.declare()
    ids = post.send(1, 2, 3)
    assert (post.confirm().taken, post.fates(), post.sends(ids[0])) == (0, {}, 1)
    post.consume(consumer)
    assert post.confirm().done == 3
    assert post.fates() == {each: ["consumed"] for each in ids}
    assert not post.confirm()
    (later,) = post.send(4)
    post.consume(consumer)
    assert post.confirm().done == 1
    assert post.fates()[later] == ["consumed"]
    assert post.at_a.value("SELECT count(*) FROM outbox.delivery") == 0


def test_what_the_cursor_knows_is_shown_and_stays(post: Post) -> None:
    """A message that is known without a row is shown, and isn't asked about when it was sent again."""
    consumer = post.declare()
    (half_id,) = post.send(1)
    post.consume(consumer)
    post.confirm()
    post.resend(half_id)
    post.consume(consumer)
    post.lose(half_id)
    assert not post.confirm()
    assert (post.fates(), post.sends(half_id), post.settled(half_id)) == ({half_id: ["consumed"]}, 2, True)
    view = post.app.operator.message(half_id)
    known = {"group": "g", "status": "consumed", "settled": True, "reason": None, "recorded_at": None}
    assert view.deliveries == [known]
    assert "confirmed" not in {event.kind for event in view.timeline}


def test_a_group_that_begins_anew(post: Post) -> None:
    """What was consumed before stays so; what came between is left out, and isn't taken for consumed."""
    (before,) = post.send(1)
    post.consume(post.declare())
    post.confirm()
    (between,) = post.send(2)
    for table in ("message", "offset", "start"):
        post.run(f"DELETE FROM outbox.consumer_{table}")
    consumer = post.declare(start="now")
    (after,) = post.send(3)
    post.consume(consumer)
    post.confirm()
    assert post.fates() == {before: ["consumed"], between: ["left_out"], after: ["consumed"]}
    assert [post.sends(each) for each in (before, between, after)] == [1, 1, 1]


def test_expired_is_undeliverable(post: Post) -> None:
    """What was too old for its group is settled, and its producer is told once."""
    post.knowing.on_undeliverable("t")(tell)
    consumer = post.declare()
    (half_id,) = post.send(1, expires_at=dt.datetime(2020, 1, 1, tzinfo=dt.UTC))
    post.consume(consumer)
    post.confirm()
    assert post.fates() == {half_id: ["expired"]}
    assert post.settled(half_id)
    assert post.told() == [(half_id, "g", "expired")]
    assert not post.confirm()


def test_in_one_database(village: Post) -> None:
    """A group that consumes in the producer's own database is known without naming it."""
    app = Outbox(village.producer, settings=village.settings)
    app.known_group("t", group="g")
    consumer = village.declare()
    (half_id,) = village.send(1)
    village.consume(consumer)
    assert village.confirm(app).done == 1
    assert village.fates() == {half_id: ["consumed"]}


def test_what_is_younger_than_the_grace_is_left_alone(post: Post) -> None:
    """A message is asked about when its grace is over, and so are those behind it in its queue."""
    settings = replace(post.settings, confirm_grace=3600.0)
    consumer = post.declare()
    (old,) = post.send(1)
    post.age_sends(3601)
    (young,) = post.send(2)
    post.consume(consumer)
    post.confirm(settings=settings)
    assert post.fates() == {old: ["consumed"]}
    post.age_sends(3601)
    post.confirm(settings=settings)
    assert post.fates() == {old: ["consumed"], young: ["consumed"]}


def test_failed_parked_and_retried(post: Post) -> None:
    """Each fate that isn't the last is asked about again, and written where it has changed."""
    fails = True

    def handler(message: Message, session: object) -> None:
        if fails:
            raise ValueError("no such account")

    consumer = post.declare(handler, retry_delays=(60,))
    (half_id,) = post.send(1)
    post.consume(consumer)
    assert post.confirm().failed == 1
    assert not post.confirm()
    post.retry(consumer)
    assert post.confirm().parked == 1
    assert not post.settled(half_id)
    fails = False
    post.sink.operator.retry(half_id, group="g", by="me", why="the account is there now")
    post.retry(consumer)
    post.confirm()
    assert post.fates() == {half_id: ["failed", "parked", "consumed"]}
    assert post.settled(half_id)
    assert post.sends(half_id) == 1


def test_lost_is_sent_again(post: Post) -> None:
    """A message that its group has read past without a trace is sent again, and consumed."""
    consumer = post.declare()
    ids = post.send(1, 2, 3)
    post.consume(consumer)
    post.lose(ids[1])
    post.confirm()
    assert [post.sends(each) for each in ids] == [1, 2, 1]
    assert post.fates()[ids[1]] == ["unconsumed"]
    post.consume(consumer)
    post.confirm()
    assert post.fates()[ids[1]] == ["unconsumed", "consumed"]
    acts = post.at_a.rows("SELECT actor, action, target FROM outbox.audit")
    assert [tuple(row) for row in acts] == [("confirm", "resend", str(ids[1]))]


def test_given_up_after_so_many_sends(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """A message that never arrives is sent again as often as the settings say; then that is told, once."""
    settings = replace(post.settings, confirm_resends=2)
    consumer = post.declare()
    (half_id,) = post.send(1)
    for _ in range(5):
        post.consume(consumer)
        post.lose(half_id)
        post.confirm(settings=settings)
    assert post.fates() == {half_id: ["unconsumed", "unconsumed", "resend_exhausted"]}
    assert (post.sends(half_id), post.settled(half_id)) == (3, True)
    told = [each for each in caplog.records if getattr(each, "outbox_event", "") == "delivery.exhausted"]
    assert [(each.levelno, each.message_id) for each in told] == [(logging.ERROR, str(half_id))]  # type: ignore[attr-defined]


def test_one_send_for_all_groups_that_have_lost_it(post: Post) -> None:
    """The newest send has a grace of its own: the second group waits for it."""
    settings = replace(post.settings, confirm_grace=3600.0)
    app = post.know("g", "h")
    consumers = [post.declare(group=group) for group in ("g", "h")]
    (half_id,) = post.send(1)
    for consumer in consumers:
        post.consume(consumer)
    post.lose(half_id)
    post.lose(half_id, group="h")
    post.age_sends(3601)
    post.confirm(app, settings)
    assert (post.sends(half_id), post.fates("h")) == (2, {half_id: ["unconsumed"]})
    for consumer in consumers:
        post.consume(consumer)
    post.age_sends(3601)
    post.confirm(app, settings)
    assert post.sends(half_id) == 2
    assert post.fates()[half_id] == post.fates("h")[half_id] == ["unconsumed", "consumed"]


@pytest.mark.parametrize(
    ("known", "declared", "other", "taken"),
    [
        ({"tags": ["paid"]}, {"tags": ["paid"]}, {"tag": "draft"}, {"tag": "paid"}),
        ({"headers": ["r=eu"]}, {"headers": {"r": "eu"}}, {"headers": {"r": "us"}}, {"headers": {"r": "eu"}}),
    ],
)
def test_a_filter_leaves_messages_out(
    post: Post, known: dict[str, Any], declared: dict[str, Any], other: dict[str, Any], taken: dict[str, Any]
) -> None:
    """What the group's filter doesn't take isn't missed; a known group may name headers as texts."""
    app, consumer = post.know(**known), post.declare(**declared)
    ids = post.send(1, **other) + post.send(2, **taken)
    post.consume(consumer)
    post.confirm(app)
    assert post.fates() == dict(zip(ids, (["left_out"], ["consumed"]), strict=True))
    assert post.sends(ids[0]) == 1


def test_a_group_that_began_later_has_missed_nothing(post: Post) -> None:
    """What was there before a group began was never meant for it."""
    post.send(1)
    consumer = post.declare(start="now")
    (later,) = post.send(2)
    post.consume(consumer)
    post.confirm()
    assert post.fates() == {later: ["consumed"]}


def test_one_question_after_the_other(post: Post) -> None:
    """A backlog is asked about in batches, each with its cursor."""
    settings = replace(post.settings, confirm_batch=8)
    consumer = post.declare(batch=50)
    ids = [id_ for number in range(30) for id_ in post.send(number, key=str(number % 5))]
    post.consume(consumer)
    assert post.confirm(settings=settings).done == 30
    assert post.fates() == {each: ["consumed"] for each in ids}
    assert post.at_a.value("SELECT count(*) FROM outbox.delivery_cursor") > 3


def test_an_inbox_that_can_not_be_asked(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """It is told, without a password; the other groups are asked all the same."""
    nowhere = "postgresql+psycopg://me:secret@127.0.0.1:1/nowhere"
    app = Outbox(post.producer, settings=post.settings)
    app.known_group("t", group="away", consumer=nowhere)
    app.known_group("t", group="g", consumer=post.consumer)
    consumer = post.declare()
    post.send(1)
    post.consume(consumer)
    assert post.confirm(app).done == 1
    (told,) = [each for each in caplog.records if getattr(each, "outbox_event", "") == "delivery.unreachable"]
    assert "away" in told.getMessage()
    assert "secret" not in caplog.text
    assert "secret" not in repr(app.known_groups)


def test_compensated_is_settled(post: Post) -> None:
    """A quarantine may be lifted, and is asked about again; one of a compensation that was written is the end."""
    consumer = post.declare(refuse, retry_delays=())
    (half_id,) = post.send(1)
    post.consume(consumer)
    post.run("UPDATE outbox.consumer_message SET status = 'quarantined'")
    post.confirm()
    assert (post.fates()[half_id], post.settled(half_id)) == (["quarantined"], False)
    post.at_a.run(
        "INSERT INTO outbox.compensation (half_id, function, requested_by, reason) VALUES (:id, 'f', 'me', 'test')",
        id=half_id,
    )
    post.confirm()
    assert (post.fates()[half_id], post.settled(half_id)) == (["quarantined", "quarantined"], True)
    assert not post.confirm()


def test_what_is_being_compensated_is_not_sent_again(post: Post) -> None:
    """The act refuses it, although the group has lost it."""
    consumer = post.declare()
    (half_id,) = post.send(1)
    post.consume(consumer)
    post.lose(half_id)
    post.app.operator.compensate(half_id, by="me", why="test")
    post.confirm()
    assert post.sends(half_id) == 1


def test_a_group_that_went_back(post: Post) -> None:
    """What was consumed stays so when the offset of a group is set back; what comes after is found."""
    consumer = post.declare()
    (first,) = post.send(1)
    post.consume(consumer)
    post.confirm()
    post.run("DELETE FROM outbox.consumer_offset WHERE position > 0")
    post.confirm()
    post.consume(post.declare())
    (second,) = post.send(2)
    post.consume(consumer)
    post.confirm()
    assert post.fates() == {first: ["consumed"], second: ["consumed"]}
    assert post.sends(first) == 1


def test_a_topic_with_more_queues(post: Post) -> None:
    """Queues that a topic was given later are asked about from their beginning."""
    consumer = post.declare()
    post.send(1)
    post.consume(consumer)
    post.confirm()
    post.app.declare_topic("t", 16)
    ids = [id_ for number in range(20) for id_ in post.send(number, key=str(number))]
    post.consume(post.declare(record))
    post.confirm()
    assert all(post.fates()[each] == ["consumed"] for each in ids)


def test_two_workers_at_one_group(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that have asked about the same message, the second writes nothing, and doesn't send it again."""
    consumer = post.declare()
    (half_id,) = post.send(1)
    post.consume(consumer)
    post.lose(half_id)
    asked = DatabaseInbox.statuses

    def ask_and_be_overtaken(inbox: DatabaseInbox, ids: Sequence[UUID]) -> Mapping[UUID, InboxStatus]:
        answer = asked(inbox, ids)
        monkeypatch.setattr(DatabaseInbox, "statuses", asked)
        post.confirm()
        return answer

    for sends in (2, 3):
        monkeypatch.setattr(DatabaseInbox, "statuses", ask_and_be_overtaken)
        assert not post.confirm()
        assert (post.fates()[half_id], post.sends(half_id)) == (["unconsumed"] * (sends - 1), sends)
        # The second time it isn't settled, and there is no cursor that could be overtaken.
        post.consume(consumer)
        post.lose(half_id)


def test_while_a_handler_runs(post: Post) -> None:
    """A message in the hands of its group isn't lost: its inbox row comes with the offset."""
    begun, go_on = threading.Event(), threading.Event()

    def handler(message: Message, session: Session) -> None:
        begun.set()
        assert go_on.wait(60)

    consumer = post.declare(handler)
    (half_id,) = post.send(1)
    with ThreadPoolExecutor(1) as threads:
        consuming = threads.submit(post.consume, consumer)
        assert begun.wait(60)
        assert not post.confirm()
        go_on.set()
        consuming.result()
    post.confirm()
    assert (post.fates(), post.sends(half_id)) == ({half_id: ["consumed"]}, 1)


@pytest.mark.parametrize("question", ["progress", "statuses"])
def test_consumed_between_the_questions(post: Post, monkeypatch: pytest.MonkeyPatch, question: str) -> None:
    """What the group reads while it is asked is found by this pass or by the next one, and never taken for lost."""
    consumer = post.declare()
    (first,) = post.send(1)
    post.consume(consumer)
    (second,) = post.send(2)
    asked = getattr(DatabaseInbox, question)

    def ask_and_consume(inbox: DatabaseInbox, *values: Any) -> Any:
        answer = asked(inbox, *values)
        monkeypatch.setattr(DatabaseInbox, question, asked)
        post.consume(consumer)
        return answer

    monkeypatch.setattr(DatabaseInbox, question, ask_and_consume)
    for _ in range(2):
        post.confirm()
    assert post.fates() == {first: ["consumed"], second: ["consumed"]}
    assert (post.sends(first), post.sends(second)) == (1, 1)


@pytest.mark.parametrize("act", ["retry", "park", "compensate", "prune"])
def test_changed_before_it_is_written(post: Post, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    """An answer that is out of date when it is written is put right by the next pass, and nothing is sent for it."""
    consumer = post.declare(refuse, retry_delays=(60,))
    (half_id,) = post.send(1)
    post.send(2)
    post.consume(consumer)
    asked = DatabaseInbox.statuses
    last = {"retry": ["failed", "consumed"], "park": ["failed", "parked"], "compensate": ["failed", "quarantined"]}

    def ask_and_change(inbox: DatabaseInbox, ids: Sequence[UUID]) -> Mapping[UUID, InboxStatus]:
        answer = asked(inbox, ids)
        monkeypatch.setattr(DatabaseInbox, "statuses", asked)
        match act:
            case "retry":
                post.sink.operator.retry(half_id, group="g", by="me", why="test")
                post.retry(post.declare())
            case "park":
                post.sink.operator.park(half_id, group="g", by="me", why="test")
            case "compensate":
                post.run("UPDATE outbox.consumer_message SET status = 'quarantined', next_attempt_at = NULL")
            case "prune":
                with post.producer.connect() as connection:
                    # Whatever segments the workers of other tests have made.
                    old = replace(post.settings, retention=1e-6)
                    assert prune_rows(connection, old, UUID(int=0), UUID(int=(1 << 128) - 1), lambda: False) == 1
        return answer

    monkeypatch.setattr(DatabaseInbox, "statuses", ask_and_change)
    for _ in range(2):
        post.confirm()
    assert post.fates().get(half_id) == last.get(act)
    assert post.sends(half_id) == (0 if act == "prune" else 1)


def test_declarations(post: Post) -> None:
    """What can't work is refused where it is declared, with the mend."""
    app = Outbox(post.producer, settings=post.settings)
    app.known_group("t", group="g")
    with pytest.raises(InvalidHandler, match="known already"):
        app.known_group("t", group="g")
    with pytest.raises(InvalidHandler, match="not both"):
        app.known_group("t", group="h", consumer=post.consumer, status_url="https://b/status", token="x" * 32)
    with pytest.raises(InvalidHandler, match="go together"):
        app.known_group("t", group="h", status_url="https://b/status")
    with pytest.raises(InvalidHandler, match="must begin with https"):
        app.known_group("t", group="h", status_url="ftp://b/status", token="x" * 32)
    with pytest.raises(InvalidHandler, match="no user or password"):
        app.known_group("t", group="h", status_url="https://me:pw@b/status", token="x" * 32)
    with pytest.raises(InvalidHandler, match="consumer can't be read; it must look like postgresql"):
        app.known_group("t", group="h", consumer="bank b")
    with pytest.raises(InvalidHandler, match="must be an engine"):
        app.known_group("t", group="h", consumer=5)  # type: ignore[arg-type]


def test_what_a_group_skips_is_left_out(post: Post) -> None:
    """It isn't sent again; what the group has read since a reset to it is consumed."""
    (first,) = post.send(1)
    consumer = post.declare()
    post.consume(consumer)
    skipped, later = post.send(2, 3)
    operator = Operator.open({"a": post.producer, "b": post.consumer}, post.settings)
    at = "SELECT position FROM outbox.message WHERE half_id = :id"
    operator.skip_group("g", "t", post.at_a.value(at, id=later), by="ada", why="a load test")
    post.consume(consumer)
    post.confirm()
    assert dict(post.fates()) == {first: ["consumed"], skipped: ["left_out"], later: ["consumed"]}
    assert not post.confirm()
    assert post.sends(skipped) == 1
    operator.reset_group("g", "t", post.at_a.value(at, id=skipped), by="ada", why="it was none")
    post.consume(post.declare())
    assert post.ledger() == ["1", "3", "2", "3"]


def test_parked_when_it_was_read_again(post: Post) -> None:
    """What was consumed in an earlier passage has taken effect: nobody is called for it as undeliverable."""
    post.send(1)
    post.consume(post.declare())
    operator = Operator.open({"a": post.producer, "b": post.consumer}, post.settings)
    operator.reset_group("g", "t", "first", by="ada", why="a test")
    post.consume(post.declare(refuse, retry_delays=()))
    assert post.statuses() == [("parked", 1)]
    post.confirm()
    assert list(post.fates().values()) == [["consumed"]]
