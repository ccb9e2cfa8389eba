"""The example of a bug that is found on Friday: what the inbox and the audit say afterwards."""

from __future__ import annotations

import pytest

from examples.read_again.__main__ import main


def test_billed_again(capsys: pytest.CaptureFixture[str]) -> None:
    """All since Monday is handled again, nothing of Sunday; what the inbox said before is kept, and who did it why."""
    assert main() == 0
    said = capsys.readouterr().out
    for line in (
        "Friday evening: 16 of 25 orders are billed wrongly, or not at all.",
        "The inbox: 24 consumed in passage 0, 1 parked in passage 0.",
        "It would read 21 messages again",
        "Afterwards 0 orders are billed wrongly.",
        "The inbox: 4 consumed in passage 0, 21 consumed in passage 1.",
        "What it said before: 20 consumed in passage 0, 1 parked in passage 0.",
        "The audit: ada reset_group billing/order-paid: Monday's release lost the cents.",
        "2 days ago: Parked by group billing, in passage 0",
        "0 days ago: Consumed by group billing",
    ):
        assert line in said, said
