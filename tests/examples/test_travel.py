"""Trips over four services: whole or not at all, whatever is refused and whoever is killed."""

from __future__ import annotations

import re
import subprocess
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from examples.travel.books import Service
from tests.kit import ROOT
from tests.kit.warm import forking

TRIP, BOOKED = uuid4(), uuid4()
DONE = (TRIP, BOOKED, Decimal("10.00"))


@pytest.mark.slow
def test_trips_end_whole_or_not_at_all_while_workers_are_killed() -> None:
    """60 trips, each service's worker killed twice: all end within the bound, no cent is off, nothing is undone twice.

    ``python -m examples.travel --flows 2000 --crash`` is the same with more of it.
    """
    options = ["--flows", "60", "--crash", "--kills", "10", "--within", "300"]
    command = [*forking("examples.travel"), *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Workers killed by SIGKILL: 10 (agency 2, flights 2, hotels 2, cars 2, bank 2)" in ran.stdout
    for step in ("flight", "hotel", "car", "payment"):
        assert f"because {step} " in ran.stdout
    sums = re.findall(r"^ *([\d,.]+) the ", ran.stdout, re.MULTILINE)
    assert len(sums) == 4
    assert len(set(sums)) == 1
    assert "planned" not in ran.stdout


@pytest.mark.parametrize(
    ("done", "undone", "status", "fault"),
    [
        ([DONE], [], "completed", None),
        ([DONE], [(TRIP, BOOKED)], "compensated", None),
        ([], [], "compensated", None),
        ([DONE, DONE], [], "completed", "was done 2 times"),
        ([DONE], [(TRIP, BOOKED)] * 2, "compensated", "undone 2 times"),
        ([DONE], [(TRIP, BOOKED)], "completed", "is completed, and was done 1 times, undone 1"),
        ([], [], "completed", "is completed, and was done 0 times"),
        ([DONE], [], "compensated", "is compensated, and was done 1 times, undone 0"),
        ([], [(TRIP, BOOKED)], "compensated", "was undone and never done"),
        ([DONE], [(TRIP, uuid4())], "compensated", "was undone, which has done nothing"),
    ],
)
def test_the_books_find_what_is_wrong(done: list[Any], undone: list[Any], status: str, fault: str | None) -> None:
    """Doubled, missing, and undone without having been done."""
    faults = list(Service("flight", done, undone).faults({TRIP: status}))
    assert fault in "; ".join(faults) if fault else faults == []
