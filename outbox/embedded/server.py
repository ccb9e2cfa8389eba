"""What an embedded server and one named by the user have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

from outbox.embedded import external

Progress = Callable[[str], None]
Mode = Literal["fast", "immediate"]


class ServerLike(ABC):
    """A PostgreSQL server to create databases on; a context manager that starts and stops it."""

    def __init__(self, progress: Progress | None) -> None:
        self._tell = progress or (lambda _: None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except Exception as unstopped:
            if error is None:
                raise
            # What went wrong in the block matters more.
            error.add_note(f"and then: {unstopped}")

    @abstractmethod
    def url(self, database: str = "postgres", *, driver: str = "postgresql+psycopg") -> str:
        """Return the SQLAlchemy URL of a database, password included; ``driver="postgresql"`` suits libpq.

        Raises:
            EmbeddedError: the server was not started, or has no such database.

        """

    @abstractmethod
    def start(self) -> None:
        """Start the server; returns when it takes connections.

        Raises:
            EmbeddedError: it can't be started or reached.

        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the server, and remove what was made only for this run."""

    @abstractmethod
    def restart(self, mode: Mode = "fast") -> None:
        """Stop and start the server on the same port, which cuts connections; ``immediate`` is not orderly.

        Raises:
            EmbeddedError: not possible, or PostgreSQL can't start again.

        """

    @abstractmethod
    def kill(self) -> None:
        """End every process of the server by SIGKILL, as a crash of the machine would; ``start()`` recovers.

        Raises:
            EmbeddedError: not possible.

        """

    @abstractmethod
    def _real_name(self, name: str) -> str:
        """Return the name which the database ``name`` has, or will have, on the server."""

    def create_database(self, name: str, template: str | None = None) -> None:
        """Create a database, as a copy of ``template`` if given (to which nobody may be connected).

        Raises:
            EmbeddedError: not permitted, exists already, a bad name, or a template in use.

        """
        external.create(self._address(), self._real_name(name), template and self._real_name(template))
        self._tell(f"created database {name}")

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, and end whatever is connected to it.

        Raises:
            EmbeddedError: the server refuses.

        """
        external.drop(self._address(), self._real_name(name))
        self._tell(f"dropped database {name}")

    def has_database(self, name: str) -> bool:
        """Tell whether there is a database of this name.

        Raises:
            EmbeddedError: the server doesn't answer.

        """
        return external.exists(self._address(), self._real_name(name))

    def _address(self) -> str:
        return self.url(driver="postgresql")
