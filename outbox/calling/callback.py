"""Callbacks: functions of the application that learn facts about its messages by notices (`outbox.message.notice`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from outbox.calling.function import CalledFunction
from outbox.message.answer import CALLBACK, CalledKind
from outbox.message.model import Message
from outbox.message.notice import notice_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback(CalledFunction):
    """A function that learns facts about messages of a topic: ``function(fact, session)``, in the group of `group`.

    ``app`` is the group of the `Outbox` that declares it. A class below says in ``internal`` by which internal topic it
    learns them, and in `fact` what it gets.
    """

    kind: ClassVar[CalledKind] = CALLBACK
    internal: ClassVar[str]
    app: str

    @property
    def group(self) -> str:
        """The group that handles its notices, whose name is also their tag."""
        return notice_group(self.app, self.topic)

    def fact(self, notice: Message, facts: Mapping[str, Any]) -> Any:
        """Return what the function is called with."""
        raise NotImplementedError
