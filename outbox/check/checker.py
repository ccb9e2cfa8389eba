"""The declaration of a checker: the function to ask about a topic's undecided halves, and by which rules."""

from __future__ import annotations

import datetime as dt
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outbox.database.session import CalledFunction
from outbox.errors import InvalidHandler
from outbox.message.content import Codecs, check_seconds, check_topic
from outbox.settings import Settings

_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Checker(CalledFunction):
    """The checker of a topic (RocketMQ: ``TransactionListener.checkLocalTransaction``); durations in seconds.

    ``function`` takes the `Orphan`, and a session if it has a second parameter. ``immunity`` is for halves of this
    topic that name none of their own; ``interval``, ``max_checks`` and ``timeout`` are as in `Settings`. ``model`` is
    the type that bodies are read as, ``codecs`` read those of other content types.

    Raises:
        InvalidHandler: a function that can't be called so, or a rule that can't work.
    """

    topic: str
    function: Callable[..., Any]
    immunity: float
    interval: float
    max_checks: int
    timeout: float
    model: Any = None
    codecs: Codecs = field(default_factory=Codecs, repr=False)
    takes_session: bool = False

    @classmethod
    def declare(
        cls,
        settings: Settings,
        topic: str,
        function: Callable[..., Any],
        model: Any,
        codecs: Codecs,
        rules: Mapping[str, dt.timedelta | float | None],
    ) -> Checker:
        """Return a checker; where a rule is None, it is as the settings have it.

        Raises:
            InvalidHandler: as `Checker`; or a time-out longer than a pass.
            InvalidMessage: the topic isn't a name, or a duration isn't one.
        """
        values: dict[str, Any] = {
            "immunity": settings.immunity,
            "interval": settings.check_interval,
            "max_checks": settings.max_checks,
            "timeout": settings.check_timeout,
        }
        for name, rule in rules.items():
            if rule is not None:
                values[name] = rule if name == "max_checks" else check_seconds(name, rule)
        takes_session = _takes_session(topic, function)
        checker = cls(check_topic(topic), function, **values, model=model, codecs=codecs, takes_session=takes_session)
        if checker.timeout > settings.check_time_limit:
            raise InvalidHandler(
                f"checker of {topic!r}: timeout = {checker.timeout!r} s is longer than a pass may take "
                f"(check_time_limit = {settings.check_time_limit!r} s)"
            )
        return checker

    def __post_init__(self) -> None:
        what = f"checker of {self.topic!r}"
        for name in ("interval", "timeout"):
            if not getattr(self, name) > 0:
                raise InvalidHandler(f"{what}: {name} = {getattr(self, name)!r} must be greater than 0 (seconds)")
        if type(self.max_checks) is not int or not 0 < self.max_checks <= _INT:
            raise InvalidHandler(f"{what}: max_checks = {self.max_checks!r} must be an int between 1 and {_INT}")


def _takes_session(topic: str, function: Callable[..., Any]) -> bool:
    what = f"checker of {topic!r}"
    if not callable(function):
        raise InvalidHandler(f"{what}: {function!r} is not callable")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return False
    for arguments in (("orphan", "session"), ("orphan",)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2
    raise InvalidHandler(f"{what}: {function!r} must take (orphan) or (orphan, session)")
