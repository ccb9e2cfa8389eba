"""The embedded PostgreSQL is gone however its owner ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from outbox.embedded import Server
from outbox.errors import EmbeddedError
from tests.embedded.owners import SEARCHED, WAITS, command_lines, ended, nothing_left, on_linux, owner, postmaster
from tests.kit import wait_until


@pytest.mark.parametrize("deadly", [signal.SIGKILL, signal.SIGTERM])
def test_owner_killed(deadly: signal.Signals) -> None:
    """When its owner is killed, the server ends and its folder goes."""
    with owner(WAITS) as other:
        server = postmaster(other.folder)
        other.process.send_signal(deadly)
        wait_until(lambda: nothing_left(other.folder) and ended(server), "server and folder gone")


def test_owner_killed_while_starting(tmp_path: Path) -> None:
    """When its owner is killed in the midst of initdb, nothing is left either."""
    environment = {**os.environ, "PYTHONPATH": SEARCHED, "TMPDIR": str(tmp_path)}
    with owner("print('{}', flush=True)\n" + WAITS, env=environment) as other:
        wait_until(lambda: any(tmp_path.glob("outbox-pg-*/data.new/base")), "initdb at work")
        other.process.kill()
        wait_until(lambda: not any(tmp_path.iterdir()), "folder gone")
        wait_until(lambda: not any(str(tmp_path) in line for line in command_lines()), "processes gone")


def test_owner_killed_while_its_child_lives() -> None:
    """A child forked by the owner doesn't keep the server of its killed parent alive."""
    body = """
with Server(durable=False) as server:
    child = os.fork()
    if child == 0:
        signal.pause()
    report(server, child=child)
    sys.stdin.readline()
"""
    with owner(body) as other:
        child = other.facts["child"]
        try:
            other.process.kill()
            wait_until(lambda: nothing_left(other.folder), "server and folder gone")
            assert not ended(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_ctrl_c() -> None:
    """Ctrl-C, which goes to all the processes of a terminal, ends the block in order."""
    body = """
try:
    with Server(durable=False) as server:
        report(server)
        sys.stdin.readline()
except KeyboardInterrupt:
    print("folder left" if server.folder.exists() else "nothing left")
"""
    with owner(body) as other:
        os.killpg(other.process.pid, signal.SIGINT)
        assert other.process.communicate()[0].strip() == "nothing left"
        assert nothing_left(other.folder)


def test_exception_in_the_block() -> None:
    """An error in the block passes unchanged, and the server is stopped."""
    with pytest.raises(ZeroDivisionError), Server(durable=False) as server:
        _ = 1 / 0
    assert nothing_left(server.folder)


def test_owner_that_never_stops_it() -> None:
    """A server which the program forgets to stop ends with the program."""
    with owner("server = Server(durable=False)\nserver.start()\nreport(server)\n") as other:
        other.process.wait(180)
        wait_until(lambda: nothing_left(other.folder), "server and folder gone")


def test_forked_child_does_not_stop_the_server() -> None:
    """A forked child leaves the block without stopping its parent's server, and can't restart it."""
    body = """
import psycopg
with Server(durable=False) as server:
    child = os.fork()
    if child == 0:
        try:
            server.restart()
        except Exception as error:
            sys.exit(0 if "only the process which started" in str(error) else 1)
    status = os.waitpid(child, 0)[1]
    server.restart()
    with psycopg.connect(server.url(driver="postgresql")) as connection:
        report(server, status=status, one=connection.execute("SELECT 1").fetchone()[0])
"""
    with owner(body) as other:
        assert (other.facts["status"], other.facts["one"]) == (0, 1)
        other.process.wait(180)
        assert nothing_left(other.folder)


@on_linux
def test_keeper_killed() -> None:
    """When somebody kills the process between owner and server, the server ends; stop() cleans up."""
    with Server(durable=False) as server:
        pid = postmaster(server.folder)
        assert server._keeper
        os.kill(server._keeper.pid, signal.SIGKILL)
        wait_until(lambda: ended(pid), "server gone")
        with pytest.raises(EmbeddedError, match="ended from outside"):
            server.restart()
    assert nothing_left(server.folder)
