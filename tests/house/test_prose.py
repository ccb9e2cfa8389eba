"""Prose names its actor: a worker, checker, sender, operator, caller or transaction does it, not *somebody*."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.checkout import ROOT, files

#: All that people read, but the code of tests.
PLACES = ("outbox", "docs", "README.md", "examples", "migrations")

#: Pronouns that hide who acts. *Whose* is none of them: "a queue whose offset is behind" has its owner beside it.
PRONOUN = re.compile(
    r"\b(?:who|whoever|whom|whomever|(?:no|some|any|every)body|(?:some|any|every)one|no one)\b", re.IGNORECASE
)

#: Names of things: code, and a word in quotes, such as the user 'nobody' of a machine.
NAME = re.compile(r"```.*?```|``.*?``|`[^`\n]+`|'\w+'|class=\"[^\"]*\"", re.DOTALL)

#: Files that are prose, or show it, as a whole.
TEXTS = {".html", ".md", ".yml"}


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the passages of a file that are read by people, each with the number of its first line.

    Of Python these are docstrings, comments and other strings, but those of one word, which are values.
    """
    if path.suffix in TEXTS:
        yield 1, path.read_text()
    elif path.suffix in {".py", ".pyi"}:
        text = path.read_text()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.strip().isidentifier():
                yield node.lineno, node.value


def pronouns(path: Path) -> list[str]:
    """Return ``line: pronoun`` of each pronoun in a file's passages."""
    found = []
    for line, passage in passages(path):
        shown = NAME.sub(lambda name: re.sub(r"\w", "-", name[0]), passage)
        found += [f"{line + shown.count(chr(10), 0, each.start())}: {each[0]}" for each in PRONOUN.finditer(shown)]
    return found


@pytest.mark.parametrize("place", PLACES)
def test_prose_names_its_actor(place: str) -> None:
    """No docstring, comment, text or page says who, whoever, nobody, somebody, anybody or everybody."""
    found = {str(path.relative_to(ROOT)): found for path in files(place) if (found := pronouns(path))}
    assert found == {}


def test_each_kind_of_passage_is_read(tmp_path: Path) -> None:
    """Pronouns are found in docstrings, comments, strings and f-strings; names, values and *whose* are left alone."""
    module = tmp_path / "module.py"
    module.write_text(
        '"""Nobody reads this.\n\nWhose is fine, so is `who`, and the user \'nobody\'."""\n'
        "x = 1  # somebody does\n"
        'nobody = "nobody"\n'
        'text = f"{nobody} asks " "whom to ask"\n'
    )
    assert sorted(pronouns(module)) == ["1: Nobody", "4: somebody", "6: whom"]
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nAnyone may call `whoever()`.\n\n```\nwho\n```\n")
    assert pronouns(page) == ["3: Anyone"]
