"""What an event is, and how one is declared; those that there are: `outbox.telemetry.events`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, dataclass_transform
from uuid import UUID

E = TypeVar("E", bound="TelemetryEvent")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryEvent:
    """Something that happened; ``code`` names its kind, ``area`` is the end of its logger's name.

    ``text`` is the sentence of its record, a format of `facts`. ``usual_level`` is that of `logging`.
    """

    code: ClassVar[str]
    area: ClassVar[str]
    usual_level: ClassVar[int]
    text: ClassVar[str]

    error: BaseException | None = field(default=None, repr=False, compare=False)

    @property
    def level(self) -> int:
        """The level of its record. An outage is one line in the log, not one for each try: then it is ``repeated``."""
        return logging.DEBUG if getattr(self, "repeated", False) else self.usual_level

    @property
    def shows_traceback(self) -> bool:
        """Does its record show the traceback? Repetitions of one outage don't."""
        return self.error is not None and not getattr(self, "repeated", False)

    def facts(self) -> dict[str, Any]:
        """Return its fields but for the error, with ids as texts: what its record and JSON hold."""
        return {
            each.name: _plain(getattr(self, each.name)) for each in dataclasses.fields(self) if each.name != "error"
        }


def _plain(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


@dataclass_transform(kw_only_default=True, frozen_default=True)
def event(code: str, area: str, level: int, text: str) -> Callable[[type[E]], type[E]]:
    """Declare an event: a frozen dataclass, whose fields are given by name."""

    def declare(kind: type[E]) -> type[E]:
        declared = dataclass(frozen=True, slots=True, kw_only=True)(kind)
        declared.code, declared.area, declared.usual_level, declared.text = code, area, level, text
        return declared

    return declare
