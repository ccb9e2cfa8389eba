"""The files of the checkout that are ours: what house tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

#: What tools leave beside sources: libraries of Node (also programs, and Python), bytecode, caches.
_NOT_OURS = {"node_modules", "__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


def files(place: str, *suffixes: str) -> list[Path]:
    """Return the files of a folder, or the file itself, in order.

    Parameters
    ----------
    place
        From the root of the checkout: ``outbox``, ``README.md``.
    suffixes
        Those with one of these endings alone, ``""`` for none: ``.py``.
    """
    path = ROOT / place
    found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return [
        each
        for each in found
        if not _NOT_OURS & set(each.relative_to(ROOT).parts) and (not suffixes or each.suffix in suffixes)
    ]
