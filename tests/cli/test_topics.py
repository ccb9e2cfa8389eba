"""``outbox topics list``: what an application declares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outbox.cli.output import Code
from tests.cli.conftest import run_cli

APPLICATION = """
from pydantic import BaseModel
from sqlalchemy import create_engine
from outbox import Outbox

class OrderPlaced(BaseModel):
    number: str
    customer: str

class Parcel(BaseModel):
    weight: float

outbox = Outbox(create_engine("postgresql+psycopg://localhost/never"), group="shop")
orders = outbox.topic("orders/placed", model=OrderPlaced, version=2)
parcels = outbox.topic("parcels", model=Parcel)

@orders.upcast(1)
def _(body):
    return {**body, "number": str(body["number"])}
"""


def test_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic with its model and the oldest version that its upcasters reach."""
    (tmp_path / "topics_shop.py").write_text(APPLICATION)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("OUTBOX_APP", "topics_shop:outbox")
    assert json.loads(run_cli("topics", "list", "-o", "json").out) == [
        {"topic": "orders/placed", "model": "OrderPlaced", "version": 2, "reads_since": 1},
        {"topic": "parcels", "model": "Parcel", "version": 1, "reads_since": 1},
    ]
    assert run_cli("topics", "list").out.splitlines()[0].split() == ["topic", "model", "version", "reads", "since"]


def test_no_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says how to name one."""
    monkeypatch.delenv("OUTBOX_APP", raising=False)
    result = run_cli("topics", "list")
    assert (result.code, result.err) == (
        Code.USAGE,
        "error: say where your Outbox is: --app MODULE:OBJECT (or OUTBOX_APP)\n",
    )
