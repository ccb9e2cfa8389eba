"""The site: it is built from the pages and the code without a warning; what it names is there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import make
from outbox.acts.whole_acts import DECLARATIONS
from outbox.errors import ErrorKind
from outbox.settings import Settings
from tests.docs.page import ROOT
from tests.house.checkout import files

PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.slow
def test_the_site_is_built(tmp_path: Path) -> None:
    """Strictly: no link leads nowhere, no page is left out of the navigation. Nothing is loaded from elsewhere."""
    config = make.write(tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert {path.stem for path in (tmp_path / "docs").rglob("*.md")} == _named(config)
    html = (tmp_path / "site" / "index.html").read_text()
    loaded = re.findall(r'<(?:script|img)[^>]* src="([^"]+)"|<link[^>]* rel="stylesheet"[^>]* href="([^"]+)"', html)
    assert [url for urls in loaded for url in urls if "//" in url] == []


def _named(config: Path) -> set[str]:
    return {Path(name).stem for name in re.findall(r'"([\w/-]+\.md)"', config.read_text())}


@pytest.mark.parametrize("name", make.REFERENCE)
def test_the_reference_is_made_from_the_code(name: str, tmp_path: Path) -> None:
    """Each page of the reference has rows or sections, and no object that was printed by mistake."""
    page = "\n".join(make.REFERENCE[name][1]())
    assert len(page) > 200
    assert " object at 0x" not in page
    assert "MISSING" not in page
    if name == "settings":
        assert all(f"`{each}`" in page for each in Settings.__dataclass_fields__)
    if name == "acts":
        assert all(f"| `{each.name}` |" in page for each in DECLARATIONS)
    if name == "errors":
        assert all(f"`{kind.value}`" in page for kind in ErrorKind)


def test_tests_that_the_pages_name_exist() -> None:
    """Where a page says which test proves a rule, that test is there."""
    ours = files("tests", ".py")
    texts = "\n".join(path.read_text("utf-8") for path in ours)
    known = {path.stem for path in ours} | set(re.findall(r"^(?:async )?def (test_\w+)", texts, re.MULTILINE))
    for page in PAGES:
        text = page.read_text("utf-8")
        its_own = set(re.findall(r"(?:def |title=\")(test_\w+)", text))
        # What stands behind a dot is a method of a framework's.
        named = set(re.findall(r"(?<!\.)\btest_\w+[a-z]\b(?!\*)", text))
        assert named - known - its_own == set(), page.name


def test_the_readme_is_short() -> None:
    """150 lines at most; all the rest is on a page."""
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_zensical_is_installed() -> None:
    """The extra ``test`` brings what builds the site."""
    assert importlib.util.find_spec("zensical")
