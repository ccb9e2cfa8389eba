"""Upgrades against each other and against whoever uses the tables."""

from __future__ import annotations

import subprocess
import threading

import pytest
from sqlalchemy import Engine, text

from outbox.database import migration
from outbox.database.migration import chain, runner
from outbox.errors import SchemaBusy
from tests.kit import wait_until
from tests.kit.warm import warm_python

UPGRADE = "import sys; from outbox.database import migration; print(migration.upgrade(sys.argv[1]))"
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
ADVISORY = "SELECT pg_advisory_xact_lock(hashtextextended('outbox migration outbox', 0))"

USING = """
SELECT count(*) FROM pg_locks WHERE relation = 'outbox.topic'::regclass AND mode = 'RowExclusiveLock' AND granted
"""


def start(url: str) -> subprocess.Popen[str]:
    """Start an upgrade in a process of its own."""
    return subprocess.Popen(
        [warm_python(), "-c", UPGRADE, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_upgrades_wait_for_each_other(url: str, engine: Engine) -> None:
    """Of three upgrades that begin together one does the work, and the others find it done."""
    with engine.begin() as connection:
        connection.execute(text(ADVISORY))
        processes = [start(url) for _ in range(3)]
        wait_until(lambda: connection.scalar(text(WAITING)) == 3, "three waiting upgrades")
    output = [process.communicate(timeout=60) for process in processes]
    made = [revision for branch in chain.BRANCHES for revision in reversed(chain.history(branch))]
    assert sorted(out for out, _ in output) == [f"{made}\n", "[]\n", "[]\n"]
    assert [err for _, err in output] == ["", "", ""]
    assert migration.check(url) == []


def test_waiting_for_a_turn_has_an_end(url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade that hangs doesn't hang the next one for ever."""
    monkeypatch.setattr("outbox.database.migration.runner._TURN_TIMEOUT", 0.05)
    with engine.begin() as connection:
        connection.execute(text(ADVISORY))
        with pytest.raises(SchemaBusy, match="another transaction holds a lock"):
            migration.upgrade(url)
    assert migration.upgrade(url)


def test_gives_up_on_a_lock_without_a_trace(url: str, engine: Engine) -> None:
    """A transaction that uses a table makes a downgrade give up soon, with nothing changed."""
    migration.upgrade(url)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO outbox.audit (actor, action, target) VALUES ('a', 'b', 'c')"))
        with pytest.raises(SchemaBusy, match="Nothing was changed; try again"):
            migration.downgrade(url, lock_timeout=0.05)
    assert migration.check(url) == []
    assert migration.downgrade(url)


def test_an_upgrade_comes_through_beside_busy_workers(url: str, engine: Engine) -> None:
    """Their transactions overlap, so that the table is never free for the while of a try; no worker fails for it."""
    migration.upgrade(url)
    enough, failed, said = threading.Event(), list[Exception](), list[str]()

    def work(number: int) -> None:
        transaction = text("LOCK TABLE outbox.topic IN ROW EXCLUSIVE MODE"), text("SELECT pg_sleep(1.2)")
        try:
            with engine.begin() as connection:
                connection.execute(text(f"SELECT pg_sleep({number} * 0.4)"))
            while not enough.is_set():
                with engine.begin() as connection:
                    for statement in transaction:
                        connection.execute(statement)
        except Exception as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for each in workers:
        each.start()
    try:
        with engine.connect() as connection:
            wait_until(lambda: connection.scalar(text(USING)) == 3, "all use the table")
            connection.rollback()
            with connection.begin():
                runner._lock_tables(connection, "outbox", 60.0, said.append)
                assert connection.scalar(text(USING)) == 0
    finally:
        enough.set()
        for each in workers:
            each.join()
    assert failed == []
    assert "tables were locked, then outbox.topic was in use by pid " in said[0]


def test_what_could_not_be_locked_is_named_with_the_option(url: str, engine: Engine) -> None:
    """The error says how far it came, which table it was, who uses it, and how to wait longer."""
    migration.upgrade(url)
    with engine.connect() as worker, worker.begin():
        worker.execute(text("SET LOCAL application_name = 'till'"))
        worker.execute(text("LOCK TABLE outbox.topic IN ROW EXCLUSIVE MODE"))
        pid = worker.scalar(text("SELECT pg_backend_pid()"))
        with pytest.raises(SchemaBusy) as refused:
            migration.downgrade(url, lock_timeout=0.05)
    for named in ("outbox.topic", f"pid {pid} of ", "'till'", "0.05 s", "--lock-timeout", " tables were locked"):
        assert named in str(refused.value)
