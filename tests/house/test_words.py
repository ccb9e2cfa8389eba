"""Words of before the glossary are gone from the whole tree: code, tables, tests, documents, examples, benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.checkout import ROOT, files

#: All that is ours to word. A licence, vendored files and locks aren't.
PLACES = (
    *("outbox", "docs", "examples", "migrations", "tests", "benchmarks"),
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "pyproject.toml", "Makefile"),
)
_TEXTS = {".py", ".pyi", ".md", ".html", ".toml", ".yml", ".yaml", ".json", ".sql", ".css", ".sh", ".service", ""}

#: What a worker has is a start or a lease.
CLAIM = re.compile(r"claim", re.IGNORECASE)

#: A group goes through a topic in passages. As a verb (*without reading anything*) it is English, and so is an order
#: of reading; as a noun, or in a name of code and tables, it is no word of ours. A name of a test is a sentence.
READING = re.compile(
    r"\breadings\b|(?<!\w)(?!test_)\w+_reading\b|(?<!\w)reading_\w+|\breading(?=,? *[=:)\]])|\b[Rr]eading \d"
    r"|\b(?:an?|the|this|each|earlier|later|next|first|second|new|one|group's|its) reading\b(?! order)",
    re.IGNORECASE,
)

#: A breaker lets a trial through, digests begin with a sample, a listener sends a ping, an index has look-ups.
PROBE = re.compile(r"prob(?:e|ing)", re.IGNORECASE)

#: Where a probe is one of health, by HTTP: the only meaning that is left.
HEALTH = {
    "outbox/worker/probes.py": "a worker's",
    "outbox/console/api/probes.py": "the console's",
    "outbox/console/app.py": "adds their routes",
    "outbox/console/context.py": "their paths, which need no login",
    "outbox/cli/processes.py": "the command that serves a worker's",
    "tests/telemetry/": "tests of a worker's",
    "tests/console/": "tests of the console's",
    "tests/worker/test_restarting.py": "each process has an address of its own for them",
    "tests/operator/test_stats.py": "imports the console's",
    "tests/flow/test_health.py": "imports the console's",
    "docs/observing.md": "what they answer",
    "docs/deploying.md": "Kubernetes asks them",
    "docs/console.md": "what they don't tell",
    "docs/reconciling.md": "a link to the chapter",
    "examples/deploy/": "Kubernetes asks them",
    "ARCHITECTURE.md": "a part of the worker",
    "CHANGELOG.md": "a feature",
}
#: Meanings of before, also where there are health probes.
_TRIAL = re.compile(
    r"probe_(?:at|after|due|until)|_probe\b|\bis_probe|breaker\.probed|BreakerProbed|as a probe|next probe|TCP.*probe"
)


def texts(place: str) -> dict[str, str]:
    """Return the files of a place by their path, as text."""
    return {
        str(each.relative_to(ROOT)): each.read_text("utf-8")
        for each in files(place, *_TEXTS)
        if each != Path(__file__) and ".min." not in each.name
    }


def uses(text: str, word: re.Pattern[str]) -> list[str]:
    """Return ``line: the line's text`` of each line that has the word."""
    lines = text.split("\n")
    return [f"{number}: {line.strip()}" for number, line in enumerate(lines, 1) if word.search(line)]


@pytest.mark.parametrize("place", PLACES)
def test_words_of_before_are_gone(place: str) -> None:
    """No claim, no reading as a noun, and no probe but those of health."""
    found = {}
    for path, text in texts(place).items():
        is_health = any(path.startswith(known) for known in HEALTH)
        if left := [use for word in (CLAIM, READING, _TRIAL if is_health else PROBE) for use in uses(text, word)]:
            found[path] = left
    assert found == {}


def test_each_place_of_health_probes_has_some() -> None:
    """The list of places where a probe may be named has none that doesn't."""
    named = {path for place in PLACES for path, text in texts(place).items() if uses(text, PROBE)}
    assert [known for known in HEALTH if not any(path.startswith(known) for path in named)] == []


def test_no_module_is_named_by_how_often_it_runs() -> None:
    """A module `once.py` says nothing: it is named by the pass, or by what is done."""
    found = [path for place in PLACES for path in files(place) if path.name == "once.py"]
    assert found == []


@pytest.mark.parametrize(
    ("text", "word", "is_one"),
    [
        ("a worker that claims a queue", CLAIM, True),
        ("MAX_CLAIMS = 3", CLAIM, True),
        ("an earlier reading of the group", READING, True),
        ("SELECT reading_began, consumer_reading.readings", READING, True),
        ("reading = 1", READING, True),
        ("without reading anything in a reading order, in threading.Thread", READING, False),
        ("the breaker's probe", PROBE, True),
    ],
)
def test_each_use_is_found(text: str, word: re.Pattern[str], is_one: bool) -> None:
    """Names, verbs and nouns are; reading is an English verb too."""
    assert uses(f"first\n{text}\n", word) == ([f"2: {text}"] if is_one else [])
