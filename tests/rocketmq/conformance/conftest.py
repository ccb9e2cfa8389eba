"""Checks that run side by side against one server, so that the suite takes as long as the longest of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from outbox.embedded import ServerLike
from tests.kit.databases import Databases
from tests.rocketmq.conformance import servers
from tests.rocketmq.conformance.bridge import Bridge, command
from tests.rocketmq.conformance.checks import CHECKS
from tests.rocketmq.conformance.servers import CheckedServer
from tests.rocketmq.conformance.suite import Check, CheckRun

#: So many checks run at a time: most of them wait.
_JOBS = 20


class SideBySide:
    """What runs the checks: clients' processes, of which there is one for each language that all checks share."""

    def __init__(self, folder: Path, server_for: Callable[[str], CheckedServer]) -> None:
        self.folder = folder
        self._server_for = server_for
        self._shared: dict[str, Bridge] = {}
        self._programs: dict[str, list[str] | BaseException] = {}
        self._pool = ThreadPoolExecutor(_JOBS)
        self._building: dict[str, Future[list[str]]] = {}
        self._results: dict[tuple[int, str], Future[CheckRun]] = {}
        self._errors = (folder / "errors-of-clients").open("w")

    def build(self, clients: Iterable[str]) -> None:
        """Let what the clients need be made, while a server starts."""
        self._building = {each: self._pool.submit(command, each, self.folder) for each in clients if each != "R"}

    def begin(self, number: int, client: str) -> None:
        """Let a check run, unless the machine lacks its client."""
        check = CHECKS[number]
        server = self._server_for(check.needs)
        if client != "R" and client not in self._programs:
            building = self._building[client]
            lacking = building.exception()  # pytest's own, which the check's test raises again
            self._programs[client] = lacking or building.result()
            if not lacking:
                self._shared[client] = self._new(client)
        if not isinstance(self._programs.get(client), BaseException):
            self._results[number, client] = self._pool.submit(self._run, check, client, server)

    def _new(self, client: str) -> Bridge:
        program = self._programs[client]
        assert isinstance(program, list)
        return Bridge(client, program, self.folder, self._errors)

    def _run(self, check: Check, client: str, server: CheckedServer) -> CheckRun:
        run = CheckRun(check, client, server, self._shared.get(client), partial(self._new, client))
        try:
            check.runs[client](run)
        except Exception as error:
            error.add_note("\n".join(run.seen))
            raise
        finally:
            run.close()
        return run

    def result(self, number: int, client: str) -> CheckRun:
        """Return a check that has ended; raise what ended it badly, or what the machine lacks."""
        lacking = self._programs.get(client)
        if isinstance(lacking, BaseException):
            raise lacking
        return self._results[number, client].result()

    def close(self) -> None:
        """End the clients."""
        self._pool.shutdown(cancel_futures=True)
        for bridge in self._shared.values():
            bridge.kill()
        self._errors.close()


@pytest.fixture(scope="session")
def side_by_side(request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    """The checks that this run has chosen, all begun."""
    chosen = [item for item in request.session.items if _is_check(item)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rocketmq-", ignore_cleanup_errors=True)))
        started: dict[str, CheckedServer] = {}

        def server_for(needs: str) -> CheckedServer:
            if servers.REAL:
                return servers.real(needs)
            needs = "" if needs == "tables" else needs  # which each of ours has
            if needs not in started:
                server: ServerLike = request.getfixturevalue("server")
                databases: Databases = request.getfixturevalue("databases")
                name = databases.take()
                stack.callback(databases.give_back, name)
                running = servers.ours(server.url(name), CHECKS.values(), needs, folder)
                started[needs] = stack.enter_context(running)
            return started[needs]

        running = SideBySide(folder, server_for)
        stack.callback(running.close)
        numbers = [_arguments(item) for item in chosen if not item.get_closest_marker("skip")]
        running.build({client for _, client in numbers})
        for number, client in sorted(numbers, key=lambda each: (CHECKS[each[0]].needs != "", -CHECKS[each[0]].seconds)):
            running.begin(number, client)
        yield running


def _is_check(item: pytest.Item) -> bool:
    # By its file: other tests of a whole run may have the same name.
    return item.path.name == "test_conformance.py"


def _arguments(item: pytest.Item) -> tuple[int, str]:
    params = item.callspec.params  # type: ignore[attr-defined]  # a Function that is parametrized
    return params["number"], params["client"]
