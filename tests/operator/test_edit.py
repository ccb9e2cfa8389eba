"""Edit and resend: a copy with another body, linked to its original, which can't take effect any more."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Park, Topic
from outbox.acts.changes import Actor
from outbox.errors import ActRefused, InvalidRequest, NotFound, OutboxError, VersionMismatch
from outbox.message.content import COPY_HEADER
from outbox.operator.databases import Databases, open_database
from outbox.operator.model import AuditFilter, PageRequest
from outbox.operator.operator import Operator
from outbox.testing import drain
from tests.kit import dispatch_all

TOPIC, GROUP = "transfers", "bank-b"
ANN = Actor("ann", {"via": "cli"})
WRONG = {"iban": "DE00", "amount": 12.30, "note": "rent"}


class Transfer(BaseModel):
    """A transfer."""

    iban: str
    amount: float
    note: str | None = None


class Bank:
    """Transfers, and the bank that takes them, in two databases; it parks those to an account that it doesn't know."""

    def __init__(self, producer: Engine, consumer: Engine) -> None:
        self.engine = producer
        self.producer, self.consumer = Outbox(producer), Outbox(consumer)
        self.producer.topic(Topic(TOPIC, Transfer))
        self.consumer.consumer(TOPIC, group=GROUP, retry_delays=(3600.0,), source=producer)(self.take)
        self.taken: list[str] = []
        self.fails = False
        settings = self.producer.settings
        databases = Databases([open_database(*each, settings) for each in (("a", producer), ("b", consumer))])
        self.operator = Operator(databases, topics=self.producer.topics)

    def take(self, message: Message, _: Session) -> Park | None:
        if message.body["iban"] == "DE00":
            if self.fails:
                raise RuntimeError("no such account")
            return Park("no such account")
        self.taken.append(message.body["iban"])
        return None

    def send(self, **changed: Any) -> UUID:
        with self.engine.begin() as connection:
            return self.producer.send(connection, TOPIC, WRONG | changed, key="k", headers={"tenant": "acme"})

    def drain(self) -> None:
        drain(self.producer, self.consumer)

    def parked(self) -> UUID:
        message_id = self.send()
        self.drain()
        return message_id

    def edit(self, message_id: UUID, **more: Any) -> UUID:
        body = more.pop("body", {**WRONG, "iban": "DE17"})
        given = {"by": ANN, "why": "a typo", **more}
        return self.operator.edit(message_id, body if isinstance(body, str) else json.dumps(body), **given).id

    def status(self, message_id: UUID) -> list[str]:
        rows = self.operator.message(message_id).inbox
        return ["discarded" if row.discarded_at else row.status for row in rows]

    def messages(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.scalar(text("SELECT count(*) FROM outbox.half_message")) or 0)


@pytest.fixture
def bank(new_engine: Callable[[], Engine]) -> Bank:
    """Two banks without a transfer."""
    return Bank(new_engine(), new_engine())


def test_a_copy_takes_effect_in_place_of_its_original(bank: Bank) -> None:
    """It has a new id, the rest of the original, and a link; the original is quarantined and can't come back."""
    message_id = bank.parked()
    copy = bank.edit(message_id)
    bank.drain()
    assert bank.taken == ["DE17"]
    assert (bank.status(message_id), bank.status(copy)) == (["quarantined"], ["consumed"])
    original, sent = bank.operator.message(message_id), bank.operator.message(copy)
    assert (original.copies, original.copy_of, sent.copy_of, sent.copies) == ([copy], None, message_id, [])
    half, before = sent.half or {}, original.half or {}
    assert {name: half[name] for name in ("topic", "key", "producer_group", "content_type")} == {
        name: before[name] for name in ("topic", "key", "producer_group", "content_type")
    }
    assert half["headers"]["tenant"] == "acme"
    assert half["headers"][COPY_HEADER] == str(message_id)
    assert "replaced" in original.next
    for act in ("resend", "compensate"):
        assert "a copy with another body was sent instead of it" in original.refused[act]
    with pytest.raises(ActRefused, match="resend the copy"):
        bank.operator.resend(message_id, by="bob")
    with pytest.raises(ActRefused, match="quarantined"):
        bank.operator.retry(message_id, group=GROUP, by="bob")


def test_the_audit_has_the_difference_masked(bank: Bank) -> None:
    """What changed is told by its path; a value that is masked on the page is masked there too."""
    message_id = bank.parked()
    copy = bank.edit(message_id, body='{"iban": "DE17", "amount": 12.3}')
    (row,) = bank.operator.audit(AuditFilter(action="edit"), PageRequest()).items
    assert (row.actor, row.reason, row.target, row.origin) == ("ann", "a typo", str(message_id), {"via": "cli"})
    assert row.result == {
        "copy": str(copy),
        "original": "quarantine",
        "changes": [{"path": "iban", "from": "***", "to": "***"}, {"path": "note", "from": "rent", "to": None}],
    }
    assert "DE17" not in json.dumps(row.result)


def test_numbers_stay_as_they_are_written(bank: Bank) -> None:
    """The body is what the operator wrote, to the letter: no number is rounded."""
    message_id = bank.parked()
    body = '{"iban": "DE17",  "amount": 0.10000000000000000000001}'
    assert bank.operator.body(bank.edit(message_id, body=body)) == ("application/json", body.encode())


def test_what_no_group_has_read_yet_is_quarantined_too(bank: Bank) -> None:
    """An original that its group has yet to come to doesn't take effect beside its copy."""
    bank.parked()
    message_id = bank.send(iban="DE16")
    dispatch_all(bank.engine, bank.producer.settings)
    bank.edit(message_id)
    bank.drain()
    assert bank.taken == ["DE17"]
    assert bank.status(message_id) == ["quarantined"]


def test_what_took_effect_is_edited_only_if_that_is_acknowledged(bank: Bank) -> None:
    """Else the effect would come twice without a word."""
    message_id = bank.send(iban="DE16")
    bank.drain()
    with pytest.raises(ActRefused, match=r"took effect in bank-b.*acknowledge_delivered"):
        bank.edit(message_id)
    assert bank.messages() == 1
    bank.edit(message_id, acknowledge_delivered=True)
    bank.drain()
    assert bank.taken == ["DE16", "DE17"]


def test_a_second_copy_is_sent_only_if_that_is_said(bank: Bank) -> None:
    """Whoever edits it after another operator is told of the copy."""
    message_id = bank.parked()
    first = bank.edit(message_id)
    with pytest.raises(ActRefused, match=r"a copy with another body was sent instead.*again"):
        bank.edit(message_id, body={**WRONG, "iban": "DE18"})
    second = bank.edit(message_id, body={**WRONG, "iban": "DE18"}, again=True)
    assert bank.operator.message(message_id).copies == [first, second]


def test_the_original_can_be_discarded_or_left(bank: Bank) -> None:
    """Discarded where it is parked, unless it may still take effect; or left, so that it can be retried and resent."""
    message_id = bank.parked()
    bank.edit(message_id, original="discard")
    assert bank.status(message_id) == ["discarded"]
    left = bank.parked()
    bank.edit(left, original="leave")
    assert bank.status(left) == ["parked"]
    bank.operator.resend(left, by="bob")
    bank.fails = True
    failed = bank.parked()
    with pytest.raises(ActRefused, match="may still take effect in bank-b; have it quarantined"):
        bank.edit(failed, original="discard")
    assert bank.status(failed) == ["failed"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"iban": 7, "amount": 1}', "can't be read as Transfer: iban"),
        ('{"amount": "x"', "isn't JSON"),
        ('{"iban": "' + "x" * 5_000_000 + '", "amount": 1}', "at most"),
    ],
)
def test_a_body_that_would_fail_again_is_refused(bank: Bank, body: str, why: str) -> None:
    """By the topic's model, before anything is written: the original stays as it is. No value is in the error."""
    message_id = bank.parked()
    with pytest.raises(InvalidRequest, match=why) as refused:
        bank.edit(message_id, body=body)
    assert refused.value.field == "body"
    assert len(str(refused.value)) < 500
    assert (bank.status(message_id), bank.messages()) == (["parked"], 1)


def test_what_is_wrong_with_the_order_is_said(bank: Bank) -> None:
    """No reason, no such choice, an older version, no such message, one that isn't dispatched."""
    message_id = bank.parked()
    for more, error in (
        ({"body": bank.operator.body(message_id)[1].decode()}, InvalidRequest),
        ({"why": " "}, InvalidRequest),
        ({"original": "forget"}, InvalidRequest),
        ({"version": "old"}, VersionMismatch),
    ):
        with pytest.raises(error):
            bank.edit(message_id, **more)
    with pytest.raises(NotFound):
        bank.edit(uuid4())
    with pytest.raises(ActRefused, match="waits for dispatch"):
        bank.edit(bank.send())


def test_two_operators_edit_at_once(bank: Bank) -> None:
    """One copy is sent, and the other operator's failure releases nothing of what the first one has quarantined."""
    message_id = bank.parked()
    bodies = [{**WRONG, "iban": f"DE{number}"} for number in (17, 18)]

    def edit(body: dict[str, object]) -> UUID | OutboxError:
        try:
            return bank.edit(message_id, body=body)
        except OutboxError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(edit, bodies))
    assert sorted(type(each).__name__ for each in results) == ["ActRefused", "UUID"]
    assert bank.status(message_id) == ["quarantined"]
    bank.drain()
    assert len(bank.taken) == 1


def test_a_copy_that_can_not_be_sent_leaves_the_original_as_it_was(bank: Bank) -> None:
    """What was quarantined before is released, with the status it had."""
    message_id = bank.parked()
    with bank.engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox.audit ADD CONSTRAINT no_edit CHECK (action <> 'edit') NOT VALID"))
    with pytest.raises(DBAPIError, match="no_edit"):
        bank.edit(message_id)
    assert (bank.status(message_id), bank.messages()) == (["parked"], 1)
    with bank.engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox.audit DROP CONSTRAINT no_edit"))
    bank.edit(message_id)
    assert bank.status(message_id) == ["quarantined"]
