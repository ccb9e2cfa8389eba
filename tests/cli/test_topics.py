"""``outbox topics``: what is declared, whether releases understand each other, and an AsyncAPI document."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from outbox.cli.exits import Code
from tests.cli.conftest import run_cli

FIRST = """
from pydantic import BaseModel
from sqlalchemy import create_engine
from outbox import Outbox

class OrderPlaced(BaseModel):
    number: int
    customer: str

class Parcel(BaseModel):
    weight: float

outbox = Outbox(create_engine("postgresql+psycopg://localhost/never"), group="shop")
orders = outbox.topic("orders/placed", model=OrderPlaced)
parcels = outbox.topic("parcels", model=Parcel)

@outbox.consumer(orders, group="mail")
def mail(message, session): ...

@outbox.consumer(parcels, group="stock", source="postgresql+psycopg://localhost/elsewhere")
def stock(message, session): ...
"""
OPTIONAL = FIRST.replace("customer: str", 'customer: str\n    note: str = ""')
BROKEN = FIRST.replace("number: int", "number: str")
SECOND = BROKEN.replace("model=OrderPlaced)", "model=OrderPlaced, version=2)") + (
    "\n@orders.upcast(1)\ndef _(body):\n    return {**body, 'number': str(body['number'])}\n"
)


class Release:
    """A folder with an application, of which there is one release at a time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "topics_shop.py"

    def of(self, source: str) -> None:
        """Put a release in the place of the one before."""
        self.path.write_text(source)
        sys.modules.pop("topics_shop", None)
        importlib.invalidate_caches()


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """The folder, in which commands run; Python compiles each release anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("OUTBOX_APP", "topics_shop:outbox")
    return Release(tmp_path)


def test_a_release_after_the_other(release: Release, tmp_path: Path) -> None:
    """What a rollout would break is refused before it; what it can't break is written down."""
    release.of(FIRST)
    missing = run_cli("topics", "check")
    assert (missing.code, missing.err) == (
        Code.NOT_FOUND,
        "error: there is no topics.json; outbox topics export topics.json makes it\n",
    )
    assert run_cli("topics", "export").err == "added to topics.json: orders/placed, parcels\n"
    assert run_cli("topics", "check").code == Code.DONE

    release.of(OPTIONAL)
    new = run_cli("topics", "check")
    assert (new.code, new.err) == (
        Code.PROBLEMS,
        "error: orders/placed: this form of version 1 isn't in topics.json; outbox topics export adds it\n",
    )
    assert run_cli("topics", "export").code == Code.DONE
    checked = run_cli("topics", "check")
    assert (checked.code, checked.out, checked.err) == (Code.DONE, "", "2 topics compatible with topics.json\n")
    before = (tmp_path / "topics.json").read_bytes()

    release.of(BROKEN)
    broken = run_cli("topics", "check")
    assert broken.code == Code.PROBLEMS
    why = "can't read bodies of releases before: field number is integer, and string is expected"
    assert f"orders/placed: {why}" in broken.err
    assert run_cli("topics", "export").code == Code.PROBLEMS
    assert (tmp_path / "topics.json").read_bytes() == before

    release.of(SECOND)
    assert run_cli("topics", "export").code == run_cli("topics", "check").code == Code.DONE
    assert sorted(json.loads((tmp_path / "topics.json").read_text())["orders/placed"]) == ["1", "2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["topics.json", "topics_shop.py"]


def test_the_list(release: Release) -> None:
    """Each topic with its model and the oldest version that its upcasters reach."""
    release.of(SECOND)
    assert json.loads(run_cli("topics", "list", "-o", "json").out) == [
        {"topic": "orders/placed", "model": "OrderPlaced", "version": 2, "reads_since": 1},
        {"topic": "parcels", "model": "Parcel", "version": 1, "reads_since": 1},
    ]
    assert run_cli("topics", "list").out.splitlines()[0].split() == ["topic", "model", "version", "reads", "since"]


def test_an_asyncapi_document(release: Release) -> None:
    """A topic of this database may be sent; one that is consumed from another database is received only."""
    release.of(SECOND)
    document = run_cli("topics", "asyncapi", "--api-version", "2.1").json
    assert document["asyncapi"] == "3.0.0"
    assert document["info"] == {"title": "shop", "version": "2.1"}
    assert {name: channel["address"] for name, channel in document["channels"].items()} == {
        "orders_placed": "orders/placed",
        "parcels": "parcels",
    }
    assert {name: operation["action"] for name, operation in document["operations"].items()} == {
        "send.orders_placed": "send",
        "receive.orders_placed.mail": "receive",
        "receive.parcels.stock": "receive",
    }
    message = document["components"]["messages"]["orders_placed"]
    assert message["payload"]["schema"]["properties"]["number"]["type"] == "string"
    assert message["headers"]["required"] == ["outbox-version"]

    def refs(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for each in value.values() for text in refs(each)] + (
                [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            )
        return [text for each in value for text in refs(each)] if isinstance(value, list) else []

    for ref in refs(document):
        target = document
        for step in ref.removeprefix("#/").split("/"):
            target = target[step]


@pytest.mark.parametrize("content", ["{", "[]", '{"orders": 7}'])
def test_a_file_that_is_something_else(release: Release, tmp_path: Path, content: str) -> None:
    """It is refused, and not written over."""
    release.of(FIRST)
    (tmp_path / "topics.json").write_text(content)
    for command in ("check", "export"):
        result = run_cli("topics", command)
        assert (result.code, result.err[:19]) == (Code.CONFIG, "error: topics.json:")
    assert (tmp_path / "topics.json").read_text() == content


def test_no_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says how to name one."""
    monkeypatch.delenv("OUTBOX_APP", raising=False)
    result = run_cli("topics", "list")
    assert (result.code, result.err) == (
        Code.USAGE,
        "error: say where your Outbox is: --app MODULE:OBJECT (or OUTBOX_APP)\n",
    )
