"""The page of all checks is what the checks say."""

from __future__ import annotations

import itertools

from tests.rocketmq.conformance.checks import CHECKS
from tests.rocketmq.conformance.table import PAGE, page


def test_the_page_is_made_of_the_checks() -> None:
    """What a check declares is what users read."""
    assert PAGE.read_text("utf-8") == page(), "python -m tests.rocketmq.conformance.table writes it"


def test_no_number_is_left_out() -> None:
    """All of the list of 75 are checked, and those from 101 on."""
    assert sorted(CHECKS) == [
        *range(1, 76),
        *itertools.takewhile(lambda each: each <= max(CHECKS), itertools.count(101)),
    ]
