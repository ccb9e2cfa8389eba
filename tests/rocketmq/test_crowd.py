"""Messages through four consumers and two servers, of which one is killed: each settled once, each key in order."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine

from tests.kit.effort import tries
from tests.rocketmq.crowd import run


def test_each_message_is_settled_once(engine: Engine, tmp_path: Path) -> None:
    """With failures, leases that end, dead letters, and kills; `tests.rocketmq.crowd` alone takes any number."""
    counts, faults = run(engine, tmp_path, messages=tries(400), kills=2)
    assert not faults, (faults[:5], counts)
    assert counts["given back"]
    assert counts["in the end parked"]
