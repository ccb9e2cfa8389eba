"""Bulk jobs as a duty of a worker, and in users' tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from outbox import Message, Outbox, Settings
from outbox.database import migration
from outbox.embedded import ServerLike
from outbox.errors import InvalidHandler, SchemaMissing
from outbox.testing import bulk
from outbox.worker import Worker
from tests.kit import wait_until
from tests.operator.acting import Desk
from tests.operator.test_bulk_jobs_order import PARKED
from tests.operator.test_bulk_jobs_run import acted_once, retry

FEW = Settings(listen=False)


@pytest.fixture
def desk(new_engine: Callable[..., Engine]) -> Desk:
    """A desk over a database of this test's own."""
    return Desk.over(bank=new_engine())


def done(desk: Desk, row: Any) -> bool:
    """Has a bulk job ended?"""
    return desk.bulk_job(row).finished_at is not None


def test_a_worker_carries_out_what_was_ordered(desk: Desk) -> None:
    """On both sides' tables, what was ordered before it began and while it runs, and it drains in good order."""
    before = retry(desk, 300)
    with Worker(desk.outbox) as worker:
        wait_until(lambda: done(desk, before), "what was ordered before is done")
        sent = desk.start("resend", [desk.half("dispatched") for _ in range(2)])
        wait_until(lambda: done(desk, sent), "what was ordered since is done")
        assert worker.health()["bulk"].failures == 0
        assert "compensate" not in worker.health()
    acted_once(desk, before, 300)
    assert desk.bulk_job(sent).done == 2


def test_killed_in_the_middle(desk: Desk) -> None:
    """SIGKILL: who comes next goes on where the dead worker was, and every item is acted on exactly once."""
    row = retry(desk, 500)
    url = desk.engine.url.render_as_string(hide_password=False)
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-m", "tests.worker.bulk_worker", url], cwd=root) as process:
        wait_until(lambda: desk.bulk_job(row).done, "some are done")
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert 0 < desk.bulk_job(row).done < 500
    with Worker(desk.outbox, roles=["bulk"]):
        wait_until(lambda: done(desk, row), "the next worker has done the rest")
    acted_once(desk, row, 500)


def test_two_workers_and_the_one_who_ordered_it(desk: Desk) -> None:
    """They share the items; each is acted on once."""
    row = retry(desk, 1000)
    other = Outbox(create_engine(desk.engine.url), settings=FEW)
    with Worker(desk.outbox, roles=["bulk"]), Worker(other, roles=["bulk"]):
        desk.work()
        wait_until(lambda: done(desk, row), "all is done")
    acted_once(desk, row, 1000)


def test_a_worker_on_a_database_of_one_side(server: ServerLike) -> None:
    """Bulk jobs need no more than the tables that are there; without any, the worker says what to run."""
    for part in ("consumer", "producer"):
        server.create_database(f"only_{part}")
        engine = create_engine(server.url(f"only_{part}"))
        with (
            pytest.raises(SchemaMissing, match="outbox db upgrade"),
            Worker(Outbox(engine, settings=FEW), roles=["bulk"]),
        ):
            pass
        migration.upgrade(engine, [part])
        desk = Desk.over(bank=engine)
        act = "retry" if part == "consumer" else "check"
        target = (desk.inbox("parked")[0], "bank-b") if part == "consumer" else desk.half("undecided")
        row = desk.start(act, [target])
        with Worker(desk.outbox, roles=["bulk"]):
            wait_until(partial(done, desk, row), f"done on the {part}'s side")
        assert desk.bulk_job(row).done == 1
        engine.dispose()
        server.drop_database(f"only_{part}")


def _undo(message: Message, session: Any) -> dict[str, str]:
    session.execute(text("INSERT INTO undone (id) VALUES (:id)"), {"id": message.id})
    return {"undone": "all"}


def test_a_worker_rolls_back_what_it_has_the_compensation_for(desk: Desk) -> None:
    """The rollback of a topic without one waits, and holds nothing up."""
    desk.run("CREATE TABLE undone (id uuid PRIMARY KEY)")
    desk.outbox.compensation("transfers")(_undo)
    half_id, other = desk.half("dispatched"), desk.half("dispatched", topic="other")
    waiting, row = desk.start("compensate", other), desk.start("compensate", half_id)
    with Worker(desk.outbox) as worker:
        wait_until(lambda: done(desk, row), "it is rolled back")
        later = retry(desk, 1)
        wait_until(lambda: done(desk, later), "others are done meanwhile")
        assert worker.health()["compensate"].failures == 0
    assert desk.rows("SELECT id FROM undone") == [half_id]
    assert (desk.bulk_job(row).state, desk.bulk_job(waiting).state) == ("done", "waiting")


def test_in_a_test_of_a_service(desk: Desk) -> None:
    """`bulk` does here and now what a worker would do, whatever the rate."""
    desk.run("CREATE TABLE undone (id uuid PRIMARY KEY)")
    desk.outbox.compensation("transfers")(_undo)
    half_id = desk.half("dispatched")
    rolled_back, retried = desk.start("compensate", half_id), retry(desk, 150, rate=0.001)
    counts = bulk(desk.outbox)
    assert (counts.taken, counts.done, counts.more) == (151, 151, False)
    assert desk.bulk_job(rolled_back).state == desk.bulk_job(retried).state == "done"
    assert not bulk(desk.outbox)


def test_in_a_test_of_an_async_service(desk: Desk) -> None:
    """What can't be run here is refused, rather than left waiting."""

    @desk.outbox.compensation("transfers")
    async def undo(message: Message, session: Any) -> None:
        raise AssertionError

    desk.inbox("parked")
    desk.start("retry", PARKED)
    with pytest.raises(InvalidHandler, match=r"the async compensation of 'transfers'; await on_loop\(bulk, "):
        bulk(desk.outbox)
