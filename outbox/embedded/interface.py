"""What the embedded server and one named by the user have in common: databases that can be made and dropped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from outbox.embedded.binaries import MEND, OLDEST
from outbox.errors import EmbeddedError

if TYPE_CHECKING:
    import psycopg

#: Gets a line of text at each step.
Progress = Callable[[str], None]
Mode = Literal["fast", "immediate"]

LONGEST_NAME = 63
_CONNECT_LIMIT = 10


class ServerLike(ABC):
    """A PostgreSQL server to create databases on; a context manager that starts and stops it.

    What it can't do, and what the server refuses, is an `EmbeddedError`.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._report = progress or (lambda _: None)

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
        """Return the SQLAlchemy URL of a database, password included; ``driver="postgresql"`` suits libpq."""

    @abstractmethod
    def start(self) -> None:
        """Start the server; returns when it takes connections."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the server, and remove what was made only for this run."""

    @abstractmethod
    def restart(self, mode: Mode = "fast") -> None:
        """Stop and start the server on the same port, which cuts connections; ``immediate`` is not orderly."""

    @abstractmethod
    def kill(self) -> None:
        """End every process of the server by SIGKILL, as a crash of the machine would; ``start()`` recovers."""

    def create_database(self, name: str, template: str | None = None) -> None:
        """Create a database, by default as a copy of ``template1``; nothing may be connected to the template."""
        real_name = self._real_name(name)
        if not name or len(real_name.encode()) > LONGEST_NAME or "\0" in name:
            raise EmbeddedError(f"{real_name!r} can't name a database: it must have 1 to {LONGEST_NAME} bytes")
        with self._connected() as connection:
            from psycopg import errors, sql  # noqa: PLC0415 - importing this module needs no driver

            command = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(real_name))
            if template:
                command += sql.SQL(" TEMPLATE {}").format(sql.Identifier(self._real_name(template)))
            try:
                connection.execute(command)
            except errors.InsufficientPrivilege as error:
                role = connection.info.user
                raise EmbeddedError(
                    f"the role {role!r} may not create the database {real_name!r}; "
                    f'mend: ALTER ROLE "{role}" CREATEDB, or use another role'
                ) from error
        self._report(f"created database {name}")

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, and end whatever is connected to it."""
        with self._connected() as connection:
            from psycopg import sql  # noqa: PLC0415

            real_name = sql.Identifier(self._real_name(name))
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(real_name))
        self._report(f"dropped database {name}")

    def has_database(self, name: str) -> bool:
        """Return whether there is a database of this name."""
        with self._connected() as connection:
            rows = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (self._real_name(name),))
            return rows.fetchone() is not None

    def _real_name(self, name: str) -> str:
        """Return the name which the database ``name`` has, or will have, on the server."""
        return name

    def _require_version(self) -> None:
        with self._connected() as connection:
            if connection.info.server_version < OLDEST * 10_000:
                version = connection.info.parameter_status("server_version")
                raise EmbeddedError(f"the server is PostgreSQL {version}; {OLDEST} or newer is needed")

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
        try:
            import psycopg  # noqa: PLC0415
        except ImportError as error:
            raise EmbeddedError(f"psycopg can't be imported ({error}); mend: {MEND}") from error
        try:
            address = self.url(driver="postgresql")
            with psycopg.connect(address, autocommit=True, connect_timeout=_CONNECT_LIMIT) as connection:
                yield connection
        except psycopg.Error as error:
            raise EmbeddedError(str(error).strip()) from error
