"""The declaration of a checker: the function to ask about a topic's undecided halves, and by which rules."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from outbox.calling.function import CalledFunction
from outbox.errors import InvalidHandler
from outbox.message.answer import CHECKER
from outbox.settings import Settings

_INT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checker(CalledFunction):
    """The checker of a topic (RocketMQ: ``TransactionListener.checkLocalTransaction``); durations in seconds.

    ``function`` takes the `Orphan`, and a session if it has a second parameter. ``immunity`` is for halves of this
    topic that name none of their own; ``interval``, ``max_checks`` and ``timeout`` are as in `Settings`.

    Raises:
        InvalidHandler: a function that can't be called so, or a rule that can't work.
    """

    decorator = "checker"
    kind = CHECKER
    forms = (("orphan", "session"), ("orphan",))
    settings = MappingProxyType(
        {
            "immunity": "immunity",
            "interval": "check_interval",
            "max_checks": "max_checks",
            "timeout": "check_timeout",
        }
    )
    timeout: float
    immunity: float
    interval: float
    max_checks: int

    def check(self) -> None:
        """Raise InvalidHandler if a rule can't work."""
        if not self.interval > 0:
            raise InvalidHandler(f"{self.what}: interval = {self.interval!r} must be greater than 0 (seconds)")
        if type(self.max_checks) is not int or not 0 < self.max_checks <= _INT:
            raise InvalidHandler(f"{self.what}: max_checks = {self.max_checks!r} must be an int between 1 and {_INT}")

    def check_with(self, settings: Settings) -> None:
        """Raise InvalidHandler if it may take longer than a pass."""
        if self.timeout > settings.check_time_limit:
            raise InvalidHandler(
                f"{self.what}: timeout = {self.timeout!r} s is longer than a pass may take "
                f"(check_time_limit = {settings.check_time_limit!r} s)"
            )
