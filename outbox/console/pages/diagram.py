"""Draw the sequence diagram of a conversation: sender, receiver and fate of each message, and how it ended."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, replace

from outbox.console.pages.view import chip_of
from outbox.operator.model import Conversation, ConversationMessage

#: Sizes, in the units of the picture.
_COLUMN, _ROW, _TOP, _MARGIN = 190, 46, 60, 95
#: How many characters of a name, and of what stands over an arrow, are written out.
_NAME, _LABEL = 22, 26


@dataclass(frozen=True, slots=True)
class Lifeline:
    """A group that sends or receives, and where its line is; ``label`` is as much of its name as there is room for."""

    name: str
    label: str
    x: int


@dataclass(frozen=True, slots=True)
class Step:
    """One arrow: a message to a group, or to none that is known so far; or the compensation of its sender.

    ``status`` is what became of the message there, or "compensated"; ``at`` when. ``target`` is None where no group is
    known, and of a compensation. ``x`` and ``to`` are where the arrow begins and ends.
    """

    message: ConversationMessage
    source: str
    target: str | None
    status: str
    at: dt.datetime
    error: str | None = None
    x: int = 0
    to: int = 0
    y: int = 0

    @property
    def is_loop(self) -> bool:
        """Does the arrow end where it begins?"""
        return self.x == self.to

    @property
    def tone(self) -> str:
        """How good the status is."""
        return chip_of(self.status).tone

    @property
    def label(self) -> str:
        """What stands over the arrow."""
        return _short(self.message.topic, _LABEL)

    @property
    def middle(self) -> int:
        """Where the label stands."""
        return self.x + _COLUMN // 2 + 20 if self.is_loop else (self.x + self.to) // 2

    @property
    def head(self) -> str:
        """The corners of the arrow's head."""
        back, y = (7, self.y + 14) if self.is_loop else (-7 if self.to > self.x else 7, self.y)
        return f"{self.to},{y} {self.to + back},{y - 4} {self.to + back},{y + 4}"


class Diagram:
    """The picture of a conversation: ``lifelines`` in the order in which they come in, ``steps`` in that of time."""

    def __init__(self, conversation: Conversation) -> None:
        steps = _in_order(conversation.messages)
        names = dict.fromkeys(name for step in steps for name in (step.source, step.target) if name is not None)
        self.lifelines: list[Lifeline] = [
            Lifeline(name, _short(name, _NAME), _MARGIN + number * _COLUMN) for number, name in enumerate(names)
        ]
        x_of = {line.name: line.x for line in self.lifelines}
        self.steps: list[Step] = []
        for number, step in enumerate(steps):
            x = x_of[step.source]
            nowhere = x if step.status == "compensated" else x + _COLUMN // 2
            to = nowhere if step.target is None else x_of[step.target]
            self.steps.append(replace(step, x=x, to=to, y=_TOP + (number + 1) * _ROW))
        self.width: int = 2 * _MARGIN + max(len(names) - 1, 0) * _COLUMN + _COLUMN // 2
        self.height: int = _TOP + (len(steps) + 1) * _ROW


def _in_order(messages: list[ConversationMessage]) -> list[Step]:
    """Return the steps: messages in their order, each compensation after all that was sent before it."""
    steps = [step for message in messages for step in _sends(message)]
    for message in messages:
        if message.compensated_at is not None:
            undone = Step(message, message.sender, None, "compensated", message.compensated_at)
            before = [
                number
                for number, step in enumerate(steps)
                if step.message is message or step.message.born_at <= message.compensated_at
            ]
            steps.insert(before[-1] + 1, undone)
    return steps


def _sends(message: ConversationMessage) -> Iterator[Step]:
    for each in message.receipts:
        yield Step(message, message.sender, each.group, each.status, each.changed_at, each.error)
    if not message.receipts:
        yield Step(message, message.sender, None, message.status, message.born_at)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
