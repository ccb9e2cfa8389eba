"""Every code block of the README and of the pages is run, page by page, as a reader would."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from outbox.embedded import ServerLike
from tests.docs.page import ROOT, blocks, reader
from tests.kit import wait_until

QUICK_START = ROOT / "docs" / "quick-start.md"
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: What may be left out, and why: it needs a machine, a network or an hour that a test doesn't have.
REASONS = {
    "it needs a cluster",
    "it needs a jar",
    "it needs a service",
    "it shows the form of a command",
    "it shows what fails",
}


@pytest.fixture
def make_url(server: ServerLike) -> Iterator[Callable[[str, str | None], str]]:
    """A function that makes a database, empty or from a template, and returns its URL."""
    made: list[str] = []

    def make(name: str, template: str | None) -> str:
        server.create_database(name, template)
        made.append(name)
        return server.url(name)

    yield make
    for name in made:
        server.drop_database(name)


#: The database as the quick start leaves it.
SHOP = "docs_shop"


@pytest.fixture(scope="module")
def shop(server: ServerLike, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder as the quick start leaves it, from which most pages go on."""
    server.create_database(SHOP)
    with reader(tmp_path_factory.mktemp("shop") / "reader", server.url(SHOP)) as one:
        for block in blocks(QUICK_START):
            if block.title is not None:
                one.run(block)
        create = 'python -c "import shop; shop.Base.metadata.create_all(shop.engine)"'
        one.script(["outbox db upgrade", create], "setup")
    yield one.folder
    server.drop_database(SHOP)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page: Path, shop: Path, make_url: Callable[[str, str | None], str], tmp_path: Path) -> None:
    """In order, from an empty folder (README, quick start) or from where the quick start ends."""
    begins_anew = page in {ROOT / "README.md", QUICK_START}
    with reader(tmp_path / "reader", make_url("docs", None if begins_anew else SHOP)) as one:
        if not begins_anew:
            shutil.copytree(shop, one.folder, dirs_exist_ok=True)
        for block in blocks(page):
            assert block.reason is None or block.reason in REASONS, block.where
            one.run(block)
        if begins_anew:
            assert wait_until(lambda: _points(one.url), f"Alice's points\n{one.logs()}") == 1


def _points(url: str) -> int | None:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        row = connection.execute("SELECT points FROM customer WHERE name = 'alice'").fetchone()
    return row[0] if row else None


def test_every_page_has_blocks_that_say_what_they_are() -> None:
    """A block without a language would not be run."""
    assert [block.where for page in PAGES for block in blocks(page) if not block.language] == []


def test_three_services_take_at_most_30_lines() -> None:
    """The saga of the page about flows, with its handlers. That they run is tested with all blocks of the page."""
    (declaration,) = [each.text for each in blocks(ROOT / "docs" / "flows.md") if "Saga(" in each.text]
    assert declaration.count(".step(") == 3
    assert declaration.count(".consumer(") == 6
    assert len([line for line in declaration.splitlines() if line.strip()]) <= 30
