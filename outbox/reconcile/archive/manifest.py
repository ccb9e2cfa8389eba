"""What an archive is made of, and how it is written down."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self
from uuid import UUID

import pyarrow as pa

from outbox.reconcile.model import Effect, Pair, Range
from outbox.reconcile.rows import CONSUMER, PRODUCER

Kind = Literal["producer", "consumer"]

#: The version of what is written; archives of other versions are refused.
VERSION = 1
FORMAT = "outbox archive"


@dataclass(frozen=True, slots=True)
class Content:
    """Which rows an archive has: those of one side of a pair."""

    kind: Kind
    pair: Pair

    @classmethod
    def of(cls, kind: Kind, pair: Pair) -> Content:
        """Return the content; the producer's rows know nothing of the consumer's business table."""
        return cls(kind, replace(pair, effect=None) if kind == "producer" else pair)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Content:
        """Return what `told` wrote.

        Raises:
            KeyError, TypeError, ValueError: nothing of that kind.
        """
        effect = told["effect"]
        pair = Pair.of(told["topic"], told["group"], told["tags"], told["keys"], effect and Effect(**effect))
        if told["kind"] not in {"producer", "consumer"}:
            raise ValueError(told["kind"])
        return cls(told["kind"], pair)

    def told(self) -> dict[str, Any]:
        """Return it as JSON has it, after format and version."""
        pair = self.pair
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "topic": pair.topic,
            "group": pair.group,
            "tags": None if pair.tags is None else sorted(pair.tags),
            "keys": None if pair.keys is None else sorted(pair.keys),
            "effect": None if pair.effect is None else asdict(pair.effect),
        }

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return PRODUCER if self.kind == "producer" else CONSUMER

    def __str__(self) -> str:
        pair = self.told()
        rest = ", ".join(f"{name} {pair[name]}" for name in ("tags", "keys", "effect") if pair[name] is not None)
        return f"the {self.kind} of {self.pair}" + (f" ({rest})" if rest else "")


@dataclass(frozen=True, slots=True)
class Part:
    """All rows of a range of ids, as they were at ``taken_at`` by the database's clock.

    Ids below ``horizon`` may have been pruned by then. ``unsettled`` of the rows could still change.
    """

    file: str
    range: Range
    rows: int
    unsettled: int
    taken_at: dt.datetime
    horizon: UUID

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """Return what `told` wrote.

        Raises:
            KeyError, TypeError, ValueError: nothing of that kind.
        """
        return cls(
            file=told["file"],
            range=Range(UUID(told["first"]), UUID(told["end"])),
            rows=told["rows"],
            unsettled=told["unsettled"],
            taken_at=dt.datetime.fromisoformat(told["taken_at"]),
            horizon=UUID(told["horizon"]),
        )

    def told(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "file": self.file,
            "first": str(self.range.first),
            "end": str(self.range.end),
            "rows": self.rows,
            "unsettled": self.unsettled,
            "taken_at": self.taken_at.isoformat(),
            "horizon": str(self.horizon),
        }

    @property
    def complete(self) -> bool:
        """Is every message of the range in it that ever was?"""
        return self.range.first >= self.horizon


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is in an archive; the parts are in the order of their ids."""

    folder: Path
    content: Content
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(part.rows for part in self.parts)

    @property
    def taken_at(self) -> dt.datetime | None:
        """When its newest part was taken."""
        return max((part.taken_at for part in self.parts), default=None)
