"""Numbers with their nouns."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return "1 transfer", "2 transfers"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
