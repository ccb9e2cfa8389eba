"""A Ctrl-C ends a reconciliation, also where cleaning up fails by it; until then it tells what it is at."""

from __future__ import annotations

from unittest import mock

import pytest

from outbox import Settings
from outbox.cli.output import Code, Failure
from outbox.cli.reconcile import no_result
from outbox.cli.reconcilers import _run_followers
from outbox.reconcile.job import Access, Job, Pair
from outbox.reconcile.source import reaching
from tests.cli.conftest import command
from tests.cli.test_errors import interrupted
from tests.reconcile.town import Progress, Town

NOWHERE = Access("postgresql+psycopg://localhost/shop", Settings())


def test_a_ctrl_c_is_never_taken_for_an_outage() -> None:
    """Where a source is read, and where a run comes to no result."""
    with pytest.raises(KeyboardInterrupt), reaching(NOWHERE):
        interrupted()
    with pytest.raises(Failure) as failure, no_result([]):
        interrupted()
    assert failure.value.code is Code.INTERRUPTED


def test_progress_from_the_first_moment(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that may take long is a stage of its own, and the first begins before the databases are looked at."""
    titles: list[str] = []
    town.reconcile(progress=Progress(titles.append))
    rows = [] if len(titles) == 4 else ["t → g: rows"]
    assert titles == ["databases", "t → g: snapshots", "t → g: plan", *rows, "t → g: second look"]
    titles.clear()
    monkeypatch.setattr("outbox.reconcile.run._check_databases", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        town.reconcile(progress=Progress(titles.append))
    assert titles == ["databases"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_at_once_that_a_command_is_at_work(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The spinner turns while the job is described, which may ask a database for the time; a file has none."""
    shown: list[str] = []

    def describe(*_: object) -> None:
        shown.append(capsys.readouterr().err)
        raise KeyboardInterrupt

    monkeypatch.setattr("outbox.cli.reconcile.described_job", describe)
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    with pytest.raises(SystemExit):
        command()(["reconcile", "--topic", "t", "--group", "g"], prog_name="outbox")
    assert ["begins" in each for each in shown] == [terminal]


def test_a_ctrl_c_ends_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what it broke off fails over it."""
    monkeypatch.setattr("outbox.cli.reconcilers.connect", lambda _: interrupted())
    with pytest.raises(KeyboardInterrupt):
        _run_followers(Job(NOWHERE, NOWHERE, (Pair("t", "g"),)), [])
