"""What pages load: small, ours or known to be unchanged, in the wheel, and kept by browsers for ever."""

from __future__ import annotations

import hashlib
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from outbox.console.pages.view import static_files
from tests.console.web import Http

ROOT = Path(__file__).parents[2]
STATIC = Path(str(resources.files("outbox.console").joinpath("static")))
TEMPLATES = STATIC.parent / "templates"


def test_vendored_files_are_unchanged() -> None:
    """Each has the digest that VENDOR.toml names; and what isn't named there is ours."""
    vendored = tomllib.loads((STATIC / "VENDOR.toml").read_text())["file"]
    assert [entry["file"] for entry in vendored] == ["htmx.min.js"]
    for entry in vendored:
        assert hashlib.sha256((STATIC / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
        assert entry["name"], entry["version"]
        assert entry["licence"]
    ours = {path.name for path in STATIC.iterdir()} - {entry["file"] for entry in vendored}
    assert ours == {"VENDOR.toml", "console.css", "console.js", "icon.svg"}


def test_they_are_small() -> None:
    """The style sheet has at most 20 KiB, all files together less than 120."""
    assert (STATIC / "console.css").stat().st_size <= 20 * 1024
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 120 * 1024


@pytest.mark.parametrize("file", ["console.css", "console.js", "htmx.min.js", "icon.svg"])
def test_they_are_kept_for_ever(looking: Http, file: str) -> None:
    """The name has the digest of the content, so the answer may be kept; nobody has to be logged in for it."""
    static = static_files()[file]
    assert hashlib.sha256(static.content).hexdigest().startswith(static.name.split(".")[-2])
    response = looking.as_role(None).ask("GET", f"/static/{static.name}")
    assert response.status_code == 200
    assert response.content == (STATIC / file).read_bytes()
    assert response.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert response.headers["content-type"] == static.content_type
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("name", ["console.css", "VENDOR.toml", "..%2fconsole.py", "console.000000000000.css"])
def test_nothing_else_is_served(looking: Http, name: str) -> None:
    """Neither files without their digest, nor others, nor what lies beside them."""
    assert looking.ask("GET", f"/static/{name}").status_code == 404


def test_templates_have_nothing_inline() -> None:
    """No script, style or handler stands in a template, and nothing is taken for safe that isn't escaped."""
    for path in TEMPLATES.iterdir():
        text = path.read_text()
        assert not re.search(r"\sstyle=|<style|\son\w+=|hx-on|javascript:|\|\s*safe|autoescape", text), path.name
        assert not re.search(r"<script(?! src=\"\{\{ static\()", text), path.name
        assert not re.search(r"https?://", text), path.name


def test_styles_and_scripts_ask_nobody() -> None:
    """Ours name no address; the script runs no text as code, which the policy forbids anyway."""
    for file in ("console.css", "console.js"):
        text = (STATIC / file).read_text()
        assert not re.search(r"https?://|@import|url\(", text)
        assert not re.search(r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)


def test_the_wheel_has_them() -> None:
    """The build takes all files of the package, whatever their kind."""
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(ROOT))
    included = {file.relative_path for file in builder.recurse_included_files()}
    for folder in (STATIC, TEMPLATES):
        for path in folder.iterdir():
            assert str(path.relative_to(ROOT)) in included
