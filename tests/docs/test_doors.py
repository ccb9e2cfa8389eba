"""What the doors of the house (ARCHITECTURE, CONTRIBUTING, SECURITY, decisions) name is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.docs.page import ROOT

DOORS = [
    *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
]
_TOP = "outbox|migrations|tests|examples|benchmarks|docs|\\.ci|\\.github"
#: A file or a folder of the checkout, and perhaps what is defined in it.
_NAMED = re.compile(rf"`((?:{_TOP})/[\w./-]*)(?::([\w.]+))?(?:::\w+)?`")


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Return the functions, classes and constants of a module, and ``Class.method`` of its classes."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.ClassDef():
                inside = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                names |= {node.name, *(f"{node.name}.{each.name}" for each in inside)}
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                names.add(name)
    return frozenset(names)


def test_what_doors_name_is_there() -> None:
    """Each file and folder, and each function or class that stands behind a colon."""
    named = [(page.name, path, name) for page in DOORS for path, name in _NAMED.findall(page.read_text("utf-8"))]
    assert [(page, path) for page, path, _ in named if not (ROOT / path).exists()] == []
    assert [each for each in named if each[2] and each[2] not in defined_in(ROOT / each[1])] == []


def test_links_between_doors_and_pages_lead_somewhere() -> None:
    """Relative links, and their headings."""
    lost = []
    for page in DOORS:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text("utf-8")):
            there = (page.parent / target).resolve() if target else page
            if not there.exists() or (anchor and anchor not in anchors_of(there)):
                lost.append((page.name, target, anchor))
    assert lost == []


def anchors_of(page: Path) -> set[str]:
    """Return what leads to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_the_walks_name_functions() -> None:
    """The plan has a walk for each of the six ways through the house, with the functions on it."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    walks = re.split(r"^### ", text.partition("\n## Walks\n")[2].partition("\n## ")[0], flags=re.MULTILINE)[1:]
    assert len(walks) == 6
    for walk in walks:
        assert sum(bool(name) for _, name in _NAMED.findall(walk)) >= 3, walk


def test_the_tree_is_whole() -> None:
    """Each folder of the package stands in the plan, and each target of the Makefile tells what it does."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    folders = {path.parent.name for path in (ROOT / "outbox").glob("*/__init__.py")}
    assert {each for each in folders if f"`outbox/{each}/`" not in text} == set()


def test_make_helps() -> None:
    """Each target has a line of help, and what CONTRIBUTING tells a reader to make can be made."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony
    helped = set(re.findall(r"^([a-z]+): .*## \S", makefile, re.MULTILINE))
    assert helped == set(phony[1].split())
    told = set(re.findall(r"`make ([a-z]+)", "\n".join(page.read_text("utf-8") for page in DOORS)))
    assert told - helped == set()
    assert told
