"""One word for one thing: names in the package are nouns and verbs of the field, and a class name means one class."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import outbox

PACKAGE = Path(outbox.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

#: Words that say nothing of what a thing is.
RIDDLES = frozenset(
    {
        *("told", "telling", "asked", "wanted", "given", "deed", "staff", "standing", "way", "span", "place", "places"),
        *("room", "look", "looked", "looking", "patient", "kept", "aside", "sides", "book", "performance", "elsewhere"),
        *("seen", "said", "somebody", "nobody", "whoever"),
    }
)
#: Words of before the glossary: what they meant has a name of its own now.
FORMER = frozenset({"abort", "fenced_by", "fenced_from", "being_rolled_back", "operation_item", "operation_id"})
#: Columns of our tables, the package `operator/look`, a user of Unix, and what OpenTelemetry calls a span.
KNOWN = frozenset(
    {"being_asked", "IS_BEING_ASKED", "some_asked", "seen_at", "look", "nobody", "_LOOK_AT_OWNER", "span"}
)


def names_in(path: Path) -> Iterator[str]:
    """Yield the names that a module gives: its own, and those of classes, functions, parameters, variables, aliases."""
    if path.stem != "__init__":
        yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def words_of(name: str) -> set[str]:
    """Return the words of a name in snake_case or CamelCase."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_no_name_is_a_riddle() -> None:
    """What is asked, told or given says what it is instead."""
    riddles = {
        str(path.relative_to(PACKAGE)): found
        for path in MODULES
        if (found := {each for each in names_in(path) if words_of(each) & RIDDLES or each in FORMER} - KNOWN)
    }
    assert riddles == {}


def test_a_class_name_means_one_class() -> None:
    """No two classes of the package have the same name."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_module_is_called_store() -> None:
    """A module of statements is called by its name; an alias that 22 modules shared said nothing."""
    assert [path for path in MODULES if re.search(r"\bas store\b", path.read_text())] == []
