"""The chaos, in small: ``python -m tests.chaos`` makes as many kills as one likes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.processes import ROOT

KILLS = 150


@pytest.mark.slow
def test_no_cent_is_lost() -> None:
    """All that was told to be done is done, once, in order; whatever was killed."""
    command = [sys.executable, "-m", "tests.chaos", "--kills", str(KILLS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{KILLS} kills" in run.stdout
