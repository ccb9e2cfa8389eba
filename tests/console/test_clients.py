"""Clients that two common generators make of the OpenAPI document: they are typed, and work with a served console."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from tests.console.browser.live import serving
from tests.console.web import GROUP, Http, Shop, token_of
from tests.kit import sample

ROOT = Path(__file__).parents[2]
PROGRAMS = ["by_openapi_generator", "by_openapi_python_client"]
#: The one thing that openapi-python-client doesn't know by itself: lines of JSON are a file.
CONFIG = "content_type_overrides: {application/x-ndjson: application/octet-stream}\npost_hooks: []\n"


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    """Run a tool; what it says is in the error if it fails."""
    ran = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def url(acting: Http) -> Iterator[str]:
    """Where the console is served."""
    with serving(acting.app) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def generated(acting: Http, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of both clients; neither generator had to leave anything out."""
    folder = tmp_path_factory.mktemp("clients")
    (folder / "openapi.json").write_text(acting.get("/openapi.json").text, "utf-8")
    (folder / "config.yaml").write_text(CONFIG, "utf-8")
    tool = [sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none", "--fail-on-warning"]
    run(*tool, "--path", "openapi.json", "--config", "config.yaml", "--output-path", "attrs_client", cwd=folder)
    tool = [
        sys.executable,
        "-c",
        "import openapi_generator_cli as tool; tool.cli()",
        "generate",
        "-g",
        "python",
        "-i",
        "openapi.json",
    ]
    alone = "apiTests=false,modelTests=false,apiDocs=false,modelDocs=false"
    options = ["--package-name", "pydantic_client", "--global-property", alone, "-o", "."]
    run(*tool, *options, cwd=folder, JAVA_OPTS="-XX:TieredStopAtLevel=1")
    return folder


def test_the_clients_are_typed(generated: Path) -> None:
    """mypy accepts them, and programs that use them: the types are those of what is sent and returned.

    On a push one of them.
    """
    clients = {"by_openapi_python_client": "attrs_client", "by_openapi_generator": "pydantic_client"}
    typed = dict(sample(clients.items(), 1))
    programs = [ROOT / "tests" / "console" / "clients" / f"{program}.py" for program in typed]
    kept = str(ROOT / ".mypy_cache" / "clients")
    tool = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", kept]
    (generated / "mypy.ini").write_text("[mypy]\n[mypy-dateutil.*]\nignore_missing_imports = true\n", "utf-8")
    run(*tool, *typed.values(), *programs, cwd=generated, MYPYPATH=".")


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_operator_heals_with_a_client(
    program: str, generated: Path, shop: Shop, acting: Http, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists, pages, acts with If-Match, bulk jobs, files and problems, as a program has them."""
    shop.parked(1, 2, 3, trouble="no mail server")
    first, *others = (
        UUID(row["message_id"]) for row in acting.get("/inbox", params={"status": "parked"}).json()["items"]
    )
    monkeypatch.syspath_prepend(str(generated))
    seen = importlib.import_module(f"tests.console.clients.{program}").heal(url, token_of("admin"), GROUP)
    assert seen == {
        "role": "admin",
        "others": others,
        "unchanged": True,
        "bytes": acting.post(f"/messages/{first}/payload/raw").content,
        "masked": True,
        "stale": (412, "urn:outbox:problem:version-mismatch", "It has changed meanwhile"),
        "retried": True,
        "selected": len(others),
        "one job": True,
        "job": ("retry", len(others)),
        "exported": len(acting.get("/export/messages.ndjson").text.splitlines()),
        "unknown": 404,
        "stranger": 401,
    }
