"""A Ctrl-C ends a reconciliation, also where cleaning up fails by it."""

from __future__ import annotations

import pytest

from outbox import Settings
from outbox.cli.output import Code, Failure
from outbox.cli.reconcile import no_result
from outbox.cli.reconcilers import _run_followers
from outbox.reconcile.job import Access, Job, Pair
from outbox.reconcile.source import reaching
from tests.cli.test_errors import interrupted

NOWHERE = Access("postgresql+psycopg://localhost/shop", Settings())


def test_a_ctrl_c_is_never_taken_for_an_outage() -> None:
    """Where a source is read, and where a run comes to no result."""
    with pytest.raises(KeyboardInterrupt), reaching(NOWHERE):
        interrupted()
    with pytest.raises(Failure) as failure, no_result([]):
        interrupted()
    assert failure.value.code is Code.INTERRUPTED


def test_a_ctrl_c_ends_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what it broke off fails over it."""
    monkeypatch.setattr("outbox.cli.reconcilers.connect", lambda _: interrupted())
    with pytest.raises(KeyboardInterrupt):
        _run_followers(Job(NOWHERE, NOWHERE, (Pair("t", "g"),)), [])
