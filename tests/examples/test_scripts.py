"""The short examples print what they say, each as a reader runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from outbox.embedded import ServerLike
from outbox.embedded.external import URL_VARIABLE
from tests.kit import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("[0-9]*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_prints_what_it_says(script: Path, server: ServerLike) -> None:
    """By ``python examples/01_send.py``, with warnings as errors, on the server of the run."""
    text = script.read_text("utf-8")
    said = re.search(r"It prints::\n\n(.+?)\n\"\"\"", text, re.DOTALL)
    assert said, "the docstring says what is printed"
    environment = {**os.environ, URL_VARIABLE: server.url("postgres"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(script)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == textwrap.dedent(said[1]) + "\n"
    assert len(text.splitlines()) <= 70


def test_there_is_one_for_each_way_in() -> None:
    """Nine of them, numbered in the order in which a reader meets the matter."""
    assert [path.name[:2] for path in SCRIPTS] == [f"{number:02}" for number in range(1, 10)]
