"""What an application declares to be called for what is parked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outbox.database.session import CalledFunction, check_function
from outbox.message.content import Codecs, check_topic


@dataclass(frozen=True, slots=True)
class ParkedCallback(CalledFunction):
    """What is done when a message or a half of a topic is parked: ``function(letter, session)``, sync or async.

    ``model`` is the type that bodies are read as, ``codecs`` read those of other content types.

    Raises:
        InvalidHandler: the function can't be called so.
        InvalidMessage: the topic isn't a name.
    """

    topic: str
    function: Callable[..., Any]
    model: Any = None
    codecs: Codecs = field(default_factory=Codecs, repr=False)

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_function(f"on_parked of {self.topic!r}: the function", self.function, "letter", "session")
