"""Fenced functions of the stateful test, each in a thread of its own, which stop where they are told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from sqlalchemy.orm import Session, sessionmaker


class Refused(Exception):
    """The business function says no: its half is rolled back."""


class Death(BaseException):
    """The end of a process: nothing that follows it runs."""


class Call:
    """A ``@two_phase`` function in a thread of its own, which stops where it is told to.

    ``where`` is "prepared" (its half is committed, its business transaction is about to begin), "business" (its change
    is made), "deciding" (a transaction of its own is about to roll the half back) or "ended".
    """

    local = threading.local()

    def __init__(self, function: Callable[..., Any], number: int) -> None:
        self.number = number
        self.where = ""
        self.pid = 0
        self.connected = True
        self.error: BaseException | None = None
        self._begun = 0
        self._refused = False
        self._commands: SimpleQueue[BaseException | str] = SimpleQueue()
        self._reached: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._run, args=(function,), daemon=True).start()
        self.where = self._reached.get(timeout=60)

    def tell(self, command: BaseException | str = "go") -> str:
        """Let it go on, or raise an error where it stands; return where it stops next."""
        self._commands.put(command)
        self.where = self._reached.get(timeout=60)
        return self.where

    def stop(self, where: str) -> str:
        """Stop in the function's thread, until it is told what to do."""
        self._reached.put(where)
        command = self._commands.get()
        self._refused |= isinstance(command, Refused)
        if isinstance(command, BaseException):
            raise command
        return command

    def transaction(self) -> None:
        """Stop before a transaction of the decorator's begins that the business is in, or that rolls the half back.

        The first one prepares; one that only stores what the function raised decides nothing.
        """
        self._begun += 1
        if self._begun == 2:
            self.stop("prepared")
        elif self._begun == 3 and self._refused:
            self.stop("deciding")

    def _run(self, function: Callable[..., Any]) -> None:
        self.local.call = self
        try:
            function(self.number, self)
        except BaseException as error:
            self.error = error
        self._reached.put("ended")


class Sessions(sessionmaker[Session]):
    """The application's session factory; a call under way can be stopped before a transaction begins."""

    def __call__(self, **options: Any) -> Session:
        """Open a session; each of the decorator's has one transaction."""
        if (call := getattr(Call.local, "call", None)) is not None:
            call.transaction()
        return super().__call__(**options)
