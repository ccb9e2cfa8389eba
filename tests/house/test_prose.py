"""Prose names its actor: a worker, checker, sender, operator, caller or transaction does it, not *somebody*."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Folders and modules of ``outbox/`` that are written so. One that is missing here is yet to be rewritten.
DONE = (
    "__init__.py",
    "__init__.pyi",
    "app.py",
    "asgi.py",
    "check",
    "compensate",
    "consumer",
    "database",
    "dead_letter",
    "declarations.py",
    "delivery",
    "dispatch",
    "django",
    "embedded",
    "errors.py",
    "flow",
    "message",
    "producer",
    "prune",
    "pytest_plugin.py",
    "reader.py",
    "settings.py",
    "telemetry",
    "testing",
    "text.py",
    "worker",
)

#: What in them, and which pages, are yet to be rewritten.
LEFT = (
    "README.md",
    "docs/consuming.md",
    "docs/console.md",
    "docs/delivering.md",
    "docs/deploying.md",
    "docs/fastapi.md",
    "docs/flows.md",
    "docs/how-it-works.md",
    "docs/observing.md",
    "docs/operating.md",
    "docs/order_balance.md",
    "docs/peer_rules.md",
    "docs/reconciling.md",
    "docs/sending.md",
    "docs/spark.md",
    "docs/testing.md",
    "outbox/database/migration",
    "outbox/message/masking.py",
)

#: Pronouns that hide who acts. *Whose* is none of them: "a queue whose offset is behind" has its owner beside it.
PRONOUN = re.compile(
    r"\b(?:who|whoever|whom|whomever|(?:no|some|any|every)body|(?:some|any|every)one|no one)\b", re.IGNORECASE
)

#: Names of things: code, and a word in quotes, such as the user 'nobody' of a machine.
NAME = re.compile(r"```.*?```|``.*?``|`[^`\n]+`|'\w+'", re.DOTALL)

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


def files(place: str) -> list[Path]:
    """Return the files of a place in the checkout, without those that are left for later."""
    path = ROOT / place
    every = [path] if path.is_file() else [each for each in sorted(path.rglob("*")) if each.is_file()]
    later = {ROOT / each for each in LEFT}
    return [each for each in every if not later & {each, *each.parents}]


@pytest.mark.parametrize("place", [*(f"outbox/{name}" for name in DONE), "docs", "README.md"])
def test_prose_names_its_actor(place: str) -> None:
    """No docstring, comment, text or page says who, whoever, nobody, somebody, anybody or everybody."""
    found = {str(path.relative_to(ROOT)): found for path in files(place) if (found := pronouns(path))}
    assert found == {}


def test_each_place_is_there() -> None:
    """Each place of the lists exists, so that no list outlives a file."""
    assert [each for each in (*(f"outbox/{name}" for name in DONE), *LEFT) if not (ROOT / each).exists()] == []


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
