"""The doctor tells who could make segments, which one can't be emptied, and what would refuse messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.message.ids import uuid7_at
from outbox.prune import ahead
from outbox.prune import segments as module
from outbox.prune.segments import Segment, make_segment, now_ms
from tests.doctor.support import READ_ALL, codes, examine, mend_by_sql, role, sql, the

WORKER = """
INSERT INTO outbox.worker (id, name, version, roles, handlers, duties)
VALUES (:id, 'w', '1', '[]', '[]', '{"segments": {}, "dispatch": {}}')
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine may be slow."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "WAIT", 30.0)
        yield


def test_a_role_that_may_make_no_segments(engine: Engine, outbox: Outbox) -> None:
    """Where none is made, and this role couldn't, the doctor says what it takes."""
    del outbox
    with role(engine, *READ_ALL) as url:
        assert "segments.not_allowed" not in codes(examine(url))
        sql(engine, WORKER, id=uuid4())
        found = the(examine(url), "segments.not_allowed")
        assert found.details["role"] == url.username
        assert "segments.not_allowed" not in codes(examine(engine))
        mend_by_sql(engine, found)
        assert "segments.not_allowed" not in codes(examine(url))


def test_segments_that_somebody_else_makes(engine: Engine, outbox: Outbox) -> None:
    """A doctor with few privileges doesn't complain where the workers do it."""
    with engine.connect() as connection:
        module.make_next(connection, outbox.settings)
    sql(engine, WORKER, id=uuid4())
    with role(engine, *READ_ALL) as url:
        assert "segments.not_allowed" not in codes(examine(url))


def test_a_segment_that_is_overdue(engine: Engine, outbox: Outbox) -> None:
    """When half of the retention is over again since it should have gone, it is told."""
    with engine.connect() as connection:
        with connection.begin():
            now = now_ms(connection) / 1000
        old = Segment(uuid7_at(now - 86400), uuid7_at(now - 3600), "old")
        assert make_segment(connection, outbox.settings, old)
    report = examine(engine, replace(outbox.settings, retention=2000.0))
    assert the(report, "segment.overdue").details["segment"] == "old"
    assert "segment.overdue" not in codes(examine(engine, replace(outbox.settings, retention=3000.0)))


def test_a_check_that_was_left_behind(engine: Engine, outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before nobody can send any more, the doctor says so, and how to mend it."""
    with engine.connect() as connection:
        assert ahead._refuse(connection, outbox.settings)
    assert codes(examine(engine)) == []
    monkeypatch.setattr(ahead, "_LEAD", 100 * ahead._lead(outbox.settings))
    found = the(examine(engine), "segments.refusing")
    for statement in found.mend.partition("by hand: ")[2].split(";"):
        if statement.strip():
            sql(engine, statement)
    assert codes(examine(engine)) == []
    assert not sql(engine, "SELECT count(*) FROM pg_constraint WHERE conname = 'segments_ahead'")
