"""The table of RocketMQ's rules names the tests that there are, and says of each what the test says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import NamedTuple

from tests.check import test_peer_rules, test_peer_rules_asking, test_peer_rules_crashes

ROOT = Path(__file__).parents[2]
HEAD = "| RocketMQ's rule | Its class | Our test | Same or better, and how |"


class Row(NamedTuple):
    """A rule, as the table has it."""

    rule: str
    classes: str
    test: str
    verdict: str


def table() -> list[Row]:
    """Return the rules that have a test."""
    rows, ours = [], False
    for line in (ROOT / "docs" / "peer_rules.md").read_text().splitlines():
        if not line.startswith("|"):
            ours = False
        elif line == HEAD:
            ours = True
        elif ours and not line.startswith("|---"):
            rule, classes, test, verdict = (cell.strip() for cell in line.strip("|").split("|"))
            rows.append(Row(rule, classes, test.strip("`"), verdict))
    return rows


def docstring(test: str) -> str:
    """Return what a test says of itself; fails if there is no such test."""
    path, _, name = test.rpartition("::")
    function = vars(importlib.import_module(path.removesuffix(".py").replace("/", ".")))[name] if path else TESTS[name]
    assert callable(function)
    return " ".join((function.__doc__ or "").split())


#: The tests of the peer's rules by their names.
TESTS = {
    name: function
    for module in (test_peer_rules, test_peer_rules_asking, test_peer_rules_crashes)
    for name, function in vars(module).items()
    if name.startswith("test_")
}
TABLE = table()
OURS = [row for row in TABLE if "::" not in row.test]


def test_every_rule_is_in_the_table_once() -> None:
    """Each test of the peer's rules has its row, and no other has."""
    assert sorted(row.test for row in OURS) == sorted(TESTS)


def test_each_row_names_a_test() -> None:
    """The test exists and has a sentence; the row says whether the rule is the same or better, and how."""
    for row in TABLE:
        assert re.fullmatch(r"(tests/[\w/]+\.py::)?test_\w+", row.test), row
        assert docstring(row.test), row
        assert re.fullmatch(r"same(: .+)?|better: .+", row.verdict), row
        assert re.fullmatch(r"[A-Z]\w+(, [A-Z]\w+)*", row.classes), row


def test_each_row_says_what_the_test_says() -> None:
    """The test names the same class of RocketMQ, and says the same or better as the table does."""
    for row in OURS:
        said = docstring(row.test)
        assert [name for name in row.classes.split(", ") if name not in said] == [], row
        verdict = re.search(r"\b(Same|Better)\b", said)
        assert verdict, row
        assert verdict[1].lower() == row.verdict.partition(":")[0], row
