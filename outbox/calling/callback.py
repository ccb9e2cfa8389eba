"""Callbacks: functions of the application that learn facts about its messages by notices (`outbox.message.notice`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

from outbox.calling.function import CalledFunction
from outbox.message.answer import CALLBACK, CalledKind
from outbox.message.ids import derived_id
from outbox.message.model import DeadLetter, Message
from outbox.message.notice import PARKED, notice_group, original_of, parked_half


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback(CalledFunction, ABC):
    """A function that learns facts about messages of a topic: ``function(fact, session)``, in the group of `group`.

    ``app`` is the group of its `Outbox`. A class below says by which ``internal`` topic it learns, and what it gets.
    """

    kind: ClassVar[CalledKind] = CALLBACK
    internal: ClassVar[str]
    app: str

    @property
    def group(self) -> str:
        """The group that handles its notices, whose name is also their tag."""
        return notice_group(self.app, self.topic)

    @abstractmethod
    def fact(self, notice: Message, facts: Mapping[str, Any]) -> Any:
        """Return what the function is called with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedCallback(Callback):
    """The function called when a message or a half of a topic is parked: ``function(letter, session)``."""

    decorator: ClassVar[str] = "on_parked"
    forms: ClassVar[tuple[tuple[str, ...], ...]] = (("letter", "session"),)
    internal: ClassVar[str] = PARKED

    def fact(self, notice: Message, facts: Mapping[str, Any]) -> DeadLetter[Any]:
        """Return the letter, which was parked when its notice was written."""
        message: Any = None
        if facts["group"] is None:
            message = parked_half(notice, facts, self.model, self.codecs)
        elif facts["position"] is not None:
            message = original_of(notice, facts, self.model, self.codecs)
            message.attempt = facts["attempts"]
        values = facts["topic"], facts["group"], facts["reason"], facts["attempts"]
        return DeadLetter(UUID(facts["id"]), *values, notice.born_at, message)


def parked_callback(called: CalledFunction) -> ParkedCallback | None:
    """Return the callback for what is parked of the topic of a handler or a checker; None if there is none."""
    return None if called.beside is None else called.beside.of(ParkedCallback).get(called.topic)


def parked_notice(id_: UUID, group: str | None) -> UUID:
    """Return the id of the notice that a message is parked in a group, or (None) a half at its producer."""
    return derived_id(id_, PARKED, group or "")


def parked_facts(group: str | None, reason: str, attempts: int) -> dict[str, Any]:
    """Return what such a notice tells, beside its message."""
    return {"call": ParkedCallback.decorator, "group": group, "reason": reason, "attempts": attempts}
