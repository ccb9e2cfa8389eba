"""Sentences of the report: numbers with their nouns, and what the audit finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from decimal import Decimal


def counted(count: int, noun: str) -> str:
    """Return "1 transfer", "2 transfers"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def one_each(
    what: str,
    transfers: Mapping[int, Decimal],
    entries: Collection[tuple[int, Decimal]],
    excused: Collection[int] = (),
) -> Iterator[str]:
    """Find transfers that haven't exactly one of these entries, of the same amount; those excused may have none."""
    times = Counter(transfer for transfer, _ in entries)
    yield from transfers_found(f"without a {what}", transfers.keys() - times.keys() - set(excused))
    yield from transfers_found(f"with more than one {what}", (t for t, n in times.items() if n > 1))
    yield from transfers_found(f"with a {what} but never ordered", times.keys() - transfers.keys())
    wrong = {transfer for transfer, amount in entries if transfers.get(transfer, amount) != amount}
    yield from transfers_found(f"with a {what} of another amount", wrong)


def transfers_found(what: str, transfers: Iterable[int]) -> Iterator[str]:
    """Name the transfers that shouldn't be there."""
    if found := sorted(transfers):
        some = ", ".join(map(str, found[:5])) + (", …" if len(found) > 5 else "")
        yield f"{counted(len(found), 'transfer')} {what}: {some}"


def counts_differ(what: str, count: int, of: str, expected: int) -> Iterator[str]:
    """Compare two counts that should be equal."""
    if count != expected:
        yield f"{count} {what}, but {expected} {of}"
