"""The chaos, in small: ``python -m tests.chaos`` makes as many kills as one likes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.kit import tries
from tests.kit.processes import ROOT

#: With fewer orders, a run might refuse or refund none by chance.
KILLS, FLOWS = tries(12), tries(100)

_ROW = re.compile(r"│ ([^│]+?) +│ +([0-9,]+) │")


@pytest.mark.slow
def test_no_cent_is_lost() -> None:
    """All that was told to be done is done, once, in order; whatever was killed.

    Each transfer has come to its end: credited, or refunded where the account was closed, by an operator or without;
    never twice, and never what was credited.
    """
    command = [sys.executable, "-m", "tests.chaos", "--kills", str(KILLS), "--flows", str(FLOWS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    told = {what.strip(): int(number.replace(",", "")) for what, number in _ROW.findall(run.stdout)}
    assert sum(number for what, number in told.items() if what.startswith("killed: ")) >= KILLS
    assert told["orders refused"] > 0 < told["transfers refunded"]
    assert told["orders executed, as tellers were told"] + told["orders refused"] >= FLOWS
    assert told["transfers credited"] + told["transfers refunded"] == told["transfers of bank A"]
