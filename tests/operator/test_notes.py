"""Notes and owners of dead letters, and how many came in the last hours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text

from outbox import Settings
from outbox.errors import InvalidRequest, NotFound
from outbox.operator.model import AuditFilter, DeadGroup, PageRequest
from outbox.prune.prune_pass import prune_consumer_once
from tests.operator.test_fates import GROUP, TOPIC, Shop, parked


@pytest.fixture
def shop(new_engine: Callable[[], Engine]) -> Shop:
    """A shop with nothing in it."""
    return Shop(new_engine(), new_engine())


def group_of(shop: Shop) -> DeadGroup:
    """Return its one group of dead letters."""
    (group,) = shop.operator.dead_groups()
    return group


def test_a_note_stands_beside_its_dead_letters(shop: Shop) -> None:
    """Written over, taken away, and each version is in the audit."""
    parked(shop, 1, 2)
    fingerprint = group_of(shop).fingerprint
    said = shop.operator.note(fingerprint, by="ann", note="the bank is down", owner="payments")
    assert f"group {GROUP}, topic {TOPIC}" in said
    found = group_of(shop)
    assert (found.note, found.owner, found.noted_by) == ("the bank is down", "payments", "ann")
    assert found.noted_at is not None
    shop.operator.note(fingerprint, by="bob", owner="payments")
    assert (group_of(shop).note, group_of(shop).owner, group_of(shop).noted_by) == (None, "payments", "bob")
    shop.operator.note(fingerprint, by="bob", note=" ")
    assert (group_of(shop).note, group_of(shop).owner, group_of(shop).noted_by) == (None, None, None)
    rows = shop.operator.audit(AuditFilter(action="note", target=fingerprint), PageRequest()).items
    assert [(row.actor, row.result["note"], row.result["owner"]) for row in rows] == [
        ("bob", None, None),
        ("bob", None, "payments"),
        ("ann", "the bank is down", "payments"),
    ]


def test_what_is_no_note(shop: Shop) -> None:
    """Too long, not storable, or of dead letters that there are none of."""
    parked(shop, 1)
    fingerprint = group_of(shop).fingerprint
    for wrong in ("x" * 1_001, "nul\0"):
        with pytest.raises(InvalidRequest, match="the note must have at most 1000 characters"):
            shop.operator.note(fingerprint, by="ann", note=wrong)
    with pytest.raises(NotFound, match="outbox dead groups"):
        shop.operator.note("0" * 16, by="ann", note="which?")
    assert group_of(shop).note is None


def test_the_trend_counts_what_was_parked(shop: Shop) -> None:
    """By the hour, whatever became of it since; what is older than a day isn't counted, nor what only failed."""
    first, *_ = parked(shop, *range(4))
    with shop.inboxes.begin() as connection:
        for hours, number in ((5, 1), (30, 2)):
            connection.execute(
                text(
                    "UPDATE outbox.attempt_history SET failed_at = failed_at - make_interval(hours => :hours)"
                    " WHERE message_id = (SELECT message_id FROM outbox.attempt_history"
                    " WHERE failed_at > now() - interval '1 hour' AND message_id <> :first"
                    " ORDER BY message_id LIMIT 1)"
                ),
                {"hours": hours, "first": first, "number": number},
            )
    shop.operator.retry(first, group=GROUP, by="ann")
    shop.ill.discard(0)
    shop.drain()
    trend = group_of(shop).trend
    assert len(trend) == 24
    assert (sum(trend), trend[-1], trend[-6]) == (3, 2, 1)


def test_notes_are_pruned_when_nobody_needs_them(shop: Shop) -> None:
    """Old, and no such dead letter any more: both, or it stays."""
    (message_id,) = parked(shop, 1)
    shop.operator.note(group_of(shop).fingerprint, by="ann", note="mind the gap")
    count = text("SELECT count(*) FROM outbox.dead_letter_note")
    age = text("UPDATE outbox.dead_letter_note SET written_at = written_at - interval '91 days'")

    def left() -> int:
        with shop.inboxes.connect() as connection, shop.engine.connect() as source:
            prune_consumer_once(connection, source, Settings(), GROUP, TOPIC)
            return int(connection.scalar(count) or 0)

    with shop.inboxes.begin() as connection:
        connection.execute(age)
    assert left() == 1
    shop.operator.discard(message_id, group=GROUP, by="ann", why="done")
    assert left() == 0
