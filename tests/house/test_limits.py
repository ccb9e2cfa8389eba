"""No part of the house grows, but for a reason that is written down; what has become smaller stays so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import limits
from tests.house.limits import FILE, difference, differences, lowered, measure, outdated, raised, read, written

OLD = {"lines": {"outbox/check": 900}}


def test_every_part_keeps_to_its_limit() -> None:
    """Nothing is larger than its limit, or smaller by more than three in a hundred: the message has the number."""
    allowed, _ = read(FILE.read_text("utf-8"))
    if wrong := "\n".join(differences(allowed, measure())):
        pytest.fail(wrong)


def test_a_limit_is_raised_for_a_reason() -> None:
    """Beside the version of the commit before, where git is: an sdist has none."""
    text = FILE.read_text("utf-8")
    allowed, because = read(text)
    assert list(outdated(allowed, because)) == []
    before = next((each for each in limits.versions() if each != text), None)
    if before is None:
        pytest.skip("git has no other version of limits.toml")
    assert list(raised(read(before)[0], allowed, because)) == []


@pytest.mark.parametrize(
    ("limit", "there", "said"),
    [
        (900, 900, None),
        (900, 873, None),
        (900, 872, "lines.x: 872, and 900 are allowed: write 872 (make limits)"),
        (16, 15, "lines.x: 15, and 16 are allowed: write 15 (make limits)"),
        (None, 40, "lines.x has no limit: write 40"),
    ],
)
def test_the_message_has_the_number_to_write(limit: int | None, there: int, said: str | None) -> None:
    """Room is three in a hundred; of a small number nothing may be left over."""
    assert difference("lines.x", limit, there) == said


def test_what_is_too_large_says_how_to_go_on() -> None:
    """Take lines out, or raise the limit and say why."""
    said = difference("lines.x", 900, 905)
    assert said is not None
    assert "take 5 out" in said
    assert '[because] "lines.x" = "905: why"' in said


def test_a_reason_is_for_one_number() -> None:
    """A limit that rises once more needs a reason of its own; one that has fallen needs none."""
    new = {"lines": {"outbox/check": 905}}
    why = {"lines.outbox/check": "905: the check of a fence that a pooler moved"}
    assert len(list(raised(OLD, new, {}))) == 1
    assert len(list(raised(OLD, new, {"lines.outbox/check": "905: "}))) == 1
    assert list(raised(OLD, new, why)) == []
    assert len(list(raised(new, {"lines": {"outbox/check": 910}}, why))) == 1
    assert list(outdated(new, why)) == []
    assert len(list(outdated(OLD, why))) == 1


def test_limits_are_written_downwards_only() -> None:
    """A part that has grown keeps its limit, a new one gets one, one that is gone loses it; walks stay as they are."""
    old = {"lines": {"a": 10, "b": 10, "gone": 5}, "walks": {"send": 8}}
    assert lowered(old, {"lines": {"a": 9, "b": 11, "new": 3}}) == {
        "walks": {"send": 8},
        "lines": {"a": 9, "b": 10, "new": 3},
    }


def test_what_is_written_can_be_read() -> None:
    """With its reasons, but for those of other numbers."""
    numbers = {"lines": {"a": 9}, "modules": {}, "numbers": {}, "walks": {"send": 8}}
    text = written(numbers, {"lines.a": "9: it says why", "walks.send": "9: not this number"})
    assert read(text) == (numbers, {"lines.a": "9: it says why"})


def test_lines_are_counted_as_wc_does(tmp_path: Path) -> None:
    """By their ends: a last line without one doesn't count."""
    (tmp_path / "a.py").write_bytes(b"a\n\x0cb\r\nc")
    assert limits.lines_of(tmp_path.glob("*.py")) == 2
