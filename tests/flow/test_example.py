"""The example of the page: a saga of three services in at most 30 lines."""

from __future__ import annotations

from tests.docs.page import blocks
from tests.kit import ROOT


def test_three_services_take_at_most_30_lines() -> None:
    """With their handlers. That they run is tested with all blocks of the page."""
    (declaration,) = [each.text for each in blocks(ROOT / "docs" / "flows.md") if "Saga(" in each.text]
    assert declaration.count(".step(") == 3
    assert declaration.count(".consumer(") == 6
    assert len([line for line in declaration.splitlines() if line.strip()]) <= 30
