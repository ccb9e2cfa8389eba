"""The user's own PostgreSQL, named in ``OUTBOX_DATABASE_URL``."""

from __future__ import annotations

import os
import secrets
from typing import NoReturn
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

from outbox.embedded.interface import Mode, Progress, ServerLike
from outbox.errors import EmbeddedError

URL_VARIABLE = "OUTBOX_DATABASE_URL"


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
        if template is not None and template not in (*self._names, "template0", "template1"):
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
            self._require_version()
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

    def restart(self, mode: Mode = "fast") -> NoReturn:
        """Refuse: the server belongs to the user."""
        raise EmbeddedError(
            f"the server in {URL_VARIABLE} is not ours to restart ({mode}); unset it for an embedded one"
        )

    def kill(self) -> NoReturn:
        """Refuse: the server belongs to the user."""
        raise EmbeddedError(f"the server in {URL_VARIABLE} is not ours to kill; unset it for an embedded one")

    def _real_name(self, name: str) -> str:
        if name in ("template0", "template1"):
            return name
        return self._names.get(name, self._prefix + name)

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
            f"{URL_VARIABLE} must look like postgresql://user:password@host:5432/database, "
            "with special characters in the password percent-encoded"
        )
    return parts
