"""Each check with each client: a server answers as declared, and where ours differs from the real one, as wanted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.effort import EFFORT
from tests.rocketmq.conformance.bridge import NAMES
from tests.rocketmq.conformance.checks import CHECKS
from tests.rocketmq.conformance.conftest import SideBySide
from tests.rocketmq.conformance.servers import REAL, REAL_HAS
from tests.rocketmq.conformance.suite import Check

#: What of ours can be started otherwise, beside what a real one was started with.
_OURS_HAS = frozenset({"", "auth", "norecall", "tables"})
#: From this effort on, as in the night, all checks run; and always against a real one.
_NIGHT = 10
#: What the official clients do in each run: send, commit, be asked, receive, be pushed to. Their other checks are of
#: the night: the clients have deadlines of three seconds, which a machine that does other things misses.
_ALWAYS = frozenset({11, 35, 37, 51, 63})


def _marks(check: Check, client: str) -> list[pytest.MarkDecorator]:
    of_night = client in check.night or (client != "R" and check.number not in _ALWAYS and not REAL)
    if of_night and EFFORT < _NIGHT:
        return [pytest.mark.skip(f"of the night: OUTBOX_TEST_EFFORT={_NIGHT}")]
    if check.needs not in (REAL_HAS | {""} if REAL else _OURS_HAS):
        return [pytest.mark.skip(f"needs a server that was started with {check.needs!r}")]
    return []


def _checks() -> Iterator[object]:
    for number, check in sorted(CHECKS.items()):
        for client in check.runs:
            yield pytest.param(number, client, id=f"{number}-{NAMES[client]}", marks=_marks(check, client))


@pytest.mark.parametrize(("number", "client"), list(_checks()))
def test_check(number: int, client: str, side_by_side: SideBySide) -> None:
    """What the check has seen is what it expects."""
    run = side_by_side.result(number, client)
    seen = "\n".join(run.seen)
    assert not run.wrong, f"{CHECKS[number].name}\n{seen}\n{run.server.told()}"
