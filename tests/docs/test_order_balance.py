"""The tables that compare an order/balance system with ours name tests that there are."""

from __future__ import annotations

import re
from typing import NamedTuple

from outbox.message.model import DeliveryStatus, Status
from tests.docs.page import ROOT

PAGE = ROOT / "docs" / "order_balance.md"
HEAD = "| Theirs | Ours | Our test |"
#: Where tests are whose file isn't named.
FILE = "tests/examples/test_order_payment.py"


class Row(NamedTuple):
    """One thing of theirs, what stands for it here, and the test that shows it."""

    theirs: str
    ours: str
    test: str


def _rows() -> list[Row]:
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not re.match(r"\|[-|]+$", line)]
    return [Row(*row) for row in cells if row != [cell.strip() for cell in HEAD.strip("|").split("|")]]


ROWS = _rows()


def test_each_test_is_there() -> None:
    """In the file that is named, or in that of the example; and the row says what is ours."""
    for row in ROWS:
        assert row.ours, row
        match = re.fullmatch(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", row.test)
        assert match, row
        text = (ROOT / (match[1] or FILE)).read_text("utf-8")
        assert re.search(rf"^(async )?def {match[2]}\(", text, re.MULTILINE), row


def test_no_state_is_missing() -> None:
    """Each status of the inbox, each fate that a producer can learn of, and each state of theirs."""
    text = PAGE.read_text("utf-8")
    ours = {*Status, *DeliveryStatus} - {DeliveryStatus.LEFT_OUT}
    assert [each for each in ours if f"`{each}`" not in text] == []
    theirs = "sent, unconsumed", "consumed", "consume_failed", "over_consume_retry", "over_confirm_retry", "rolled_back"
    assert set(theirs) <= {row.theirs for row in ROWS}
    assert text.count(HEAD) == len(re.findall(r"^## ", text, re.MULTILINE)) == 4
