"""A topic's log between two offsets: each message once, what was pruned is told, and so is a log that went back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa
import pytest

from outbox import Outbox, Settings
from outbox.errors import InvalidMessage, InvalidSettings, MessagesPruned, SourceError
from outbox.reader import Reader
from outbox.reconcile import source
from outbox.reconcile.spark.log import LOG, LogOffset, LogOptions, StreamReader, TableReader, TopicLog, as_offset
from tests.kit import dispatch_all
from tests.reconcile.town import Town, url_of

TOPIC = "paid"


def log_of(town: Town, **options: Any) -> TopicLog:
    """Return the log of the town's producer."""
    return TopicLog(town.accesses[0], TOPIC, **options)


def send(town: Town, bodies: Sequence[Any], **sent: Any) -> list[str]:
    """Send messages and dispatch them; return their ids."""
    with town.producer.begin() as connection:
        ids = [town.app.send(connection, TOPIC, body, **sent) for body in bodies]
    dispatch_all(town.producer, town.settings)
    return [str(each) for each in ids]


def read(log: TopicLog, start: LogOffset, end: LogOffset, size: int = 3) -> list[dict[str, Any]]:
    """Return the messages between two offsets."""
    batches = [batch for each in log.stretches(start, end, size) for batch in log.read(each)]
    rows: list[dict[str, Any]] = pa.Table.from_batches(batches, LOG).to_pylist()
    return rows


def ids_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return ids in the order of the log."""
    return [row["message_id"] for row in rows]


def test_a_message_is_read_as_it_was_sent(town: Town) -> None:
    """Key, tag, headers and body come as they were given, compressed or not."""
    (plain,) = send(town, [{"n": 1}], key="k", tag="t", headers={"a": "ä"})
    large = {"text": "x" * 100_000}
    packed = Outbox(town.producer, settings=Settings(compress_above=1000))
    with town.producer.begin() as connection:
        second = packed.send(connection, TOPIC, large)
    dispatch_all(town.producer, town.settings)
    log = log_of(town)
    rows = {row["message_id"]: row for row in read(log, log.first(), log.end())}
    row = rows[plain]
    assert (row["topic"], row["key"], row["tag"], dict(row["headers"])) == (TOPIC, "k", "t", {"a": "ä"})
    assert (row["content_type"], json.loads(row["body"]), row["send_number"]) == ("application/json", {"n": 1}, 1)
    assert row["born_at"] <= row["visible_at"]
    assert json.loads(rows[str(second)]["body"]) == large
    assert dict(rows[str(second)]["headers"]) == {}


def test_offsets_follow_each_other(town: Town) -> None:
    """What is read between offsets, however many rows they may have, is each message once, in order of each queue."""
    sent = send(town, range(40))
    log = log_of(town)
    offset, rows = log.first(), []
    while (end := log.bounded(offset, log.end(), 7)) != offset:
        part = read(log, offset, end)
        assert 0 < len(part) <= 7
        rows += part
        offset = as_offset(json.loads(json.dumps(end)))
    assert sorted(ids_of(rows)) == sorted(sent)
    for queue in {row["queue"] for row in rows}:
        positions = [row["position"] for row in rows if row["queue"] == queue]
        assert positions == sorted(positions)
    more = send(town, range(5))
    assert sorted(ids_of(read(log, offset, log.end()))) == sorted(more)
    assert read(log, log.end(), log.end()) == []


def test_a_topic_that_grows_is_followed(town: Town) -> None:
    """Queues that an offset doesn't know are read from their beginning."""
    send(town, range(10))
    log = log_of(town)
    before = log.end()
    town.app.declare_topic(TOPIC, len(before) + 8)
    more = send(town, range(60))
    assert len(log.end()) > len(before)
    assert sorted(ids_of(read(log, before, before | log.end()))) == sorted(more)


def test_what_was_pruned_unread_is_counted(town: Town) -> None:
    """It stops the stream, unless that is to be skipped; what is left is read then."""
    send(town, range(30))
    log = log_of(town)
    start, end = log.first(), log.end()
    town.at_producer("DELETE FROM {s}.message WHERE position % 100000 = 2 AND queue = 0")
    with pytest.raises(MessagesPruned, match=r"topic 'paid', queue 0, 1 messages behind position 0 were pruned"):
        log.stretches(start, end, 100)
    assert len(read(log_of(town, on_pruned="skip"), start, end)) == 29


def test_what_is_pruned_while_it_is_read_is_counted(town: Town) -> None:
    """A task that finds fewer messages than were planned says so."""
    send(town, range(30))
    log = log_of(town)
    (stretch, *_) = log.stretches(log.first(), log.end(), 100)
    town.at_producer(
        "DELETE FROM {s}.message WHERE queue = :queue AND position = :at", queue=stretch.queue, at=stretch.until
    )
    with pytest.raises(MessagesPruned, match="1 messages behind"):
        list(log.read(stretch))


@pytest.mark.parametrize("loses", ["the newest", "replaces it"])
def test_a_log_that_went_back_is_told(town: Town, loses: str) -> None:
    """Where the last message that was read isn't there any more, or another one is, nothing is read on."""
    send(town, range(20))
    log = log_of(town)
    end = log.end()
    log.check(end)
    queue, last = max(end.items(), key=lambda each: each[1]["position"])
    values = {"queue": int(queue), "at": last["position"]}
    if loses == "the newest":
        town.at_producer("DELETE FROM {s}.message WHERE queue = :queue AND position = :at", **values)
    else:
        change = "UPDATE {s}.message SET half_id = gen_random_uuid() WHERE queue = :queue AND position = :at"
        town.at_producer(change, **values)
    with pytest.raises(SourceError, match=rf"the log of .* went back: in queue {queue} message {last['id']}"):
        log.check(end)


def test_a_message_without_a_half_is_told(town: Town) -> None:
    """It has no body that could be read."""
    (first, *_) = send(town, range(3))
    town.at_producer("DELETE FROM {s}.half_message WHERE id = :id", id=first)
    log = log_of(town)
    with pytest.raises(SourceError, match=f"message {first} of topic 'paid' has no half message"):
        read(log, log.first(), log.end())


def test_a_topic_that_is_not_there(town: Town) -> None:
    """Nothing would ever come from it."""
    with pytest.raises(InvalidSettings, match="there is no topic 'paid' in database"):
        log_of(town).first()


@pytest.mark.parametrize(("form", "start"), [("table", "first"), ("stream", "first"), ("stream", "now")])
def test_a_database_that_was_never_there_is_not_waited_for(
    town: Town, monkeypatch: pytest.MonkeyPatch, form: str, start: Literal["first", "now"]
) -> None:
    """A new stream tells at once that it can't begin; one that goes on would wait for a fail-over."""
    monkeypatch.setattr(source, "_FIRST_WAIT", 3600.0)
    monkeypatch.setattr(source, "_LONGEST_WAIT", 3600.0)
    nowhere = town.producer.url.set(database="nothing").render_as_string(hide_password=False)
    monkeypatch.setenv("LOG_URL", nowhere)
    options = LogOptions(TOPIC, url_env="LOG_URL", start=start)
    begin = TableReader(options).partitions if form == "table" else StreamReader(options).initialOffset
    with pytest.raises(SourceError, match="nothing"):
        begin()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url_env": "X"}, "topic is missing"),
        ({"topic": "a", "urls": "x"}, "urls"),
        ({"topic": "a", "max_rows": "0"}, "max_rows"),
        ({"topic": "a", "on_pruned": "x"}, "on_pruned"),
    ],
)
def test_options_that_cant_be(options: dict[str, str], said: str) -> None:
    """They are named."""
    with pytest.raises((InvalidSettings, InvalidMessage), match=said):
        Reader(form="text").read(LogOptions, options)


def test_a_password_stays_in_the_environment(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option is shown in plans, so it has none; and no repr of what is sent to tasks has it."""
    with pytest.raises(InvalidSettings, match="has a password"):
        LogOptions(TOPIC, url=url_of(town.producer)).log()
    monkeypatch.setenv("LOG_URL", url_of(town.producer))
    log = LogOptions(TOPIC, url_env="LOG_URL").log()
    assert str(town.producer.url.password) not in repr(log)
    with pytest.raises(InvalidSettings, match="give either url or url_env"):
        LogOptions(TOPIC).log()
