"""Undecided halves in every state, in the database of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from uuid import UUID

import pytest

from outbox.check import sql as check_sql
from outbox.database.execute import execute
from tests.check.support import Bench, open_bench
from tests.cli.half.halves import ESCAPE, answering


@pytest.fixture
def bench(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench on the database of the command line."""
    monkeypatch.delenv("OUTBOX_APP", raising=False)
    with ExitStack() as stack:
        yield open_bench(url, stack)


@pytest.fixture
def world(bench: Bench) -> dict[str, UUID]:
    """An undecided half in each state, from the oldest to the youngest, and a decided one."""
    answering(bench, max_checks=1)
    parked = bench.prepare(key=ESCAPE, body={"raise": "the till is locked\nsecond line"})
    bench.check()
    bench.outbox.checkers.clear()
    answering(bench)
    waiting = bench.prepare(key="b", body={"answer": "unknown"})
    decided = bench.prepare(body={"answer": "commit"})
    bench.check()
    asked = bench.prepare(key="c", body={})
    with bench.engine.begin() as connection:
        execute(connection, check_sql.lease("outbox", "paid", 1, check_sql.Question(15, 3600, "another")))
    bench.run("UPDATE outbox.half_check SET next_check_at = now() + interval '1 h' WHERE half_id = :id", id=waiting)
    orphan = bench.prepare("refunds", key="d")
    immune = bench.prepare("refunds", key="e", due=False, immunity=3600)
    return {
        "parked": parked,
        "waiting": waiting,
        "asked": asked,
        "orphan": orphan,
        "immune": immune,
        "decided": decided,
    }
