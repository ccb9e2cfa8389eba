"""A PostgreSQL server for the demo, the tests and first steps; not for production.

::

    with embedded.server(["bank"]) as postgres:
        engine = create_engine(postgres.url("bank"))

It takes the server in ``OUTBOX_DATABASE_URL`` if there is one. Otherwise it starts one of its own from the
PostgreSQL binaries of the machine or of a wheel (the extra ``embedded``), and stops it again however this process ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from outbox.embedded.external import URL_VARIABLE, ExternalServer, Progress, ServerLike
from outbox.embedded.own import Binaries, Server, find_binaries

__all__ = ["Binaries", "ExternalServer", "Server", "ServerLike", "find_binaries", "server"]


@contextmanager
def server(
    databases: Sequence[str] = (),
    *,
    folder: Path | None = None,
    settings: Mapping[str, str] | None = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> Iterator[ServerLike]:
    """Yield a running PostgreSQL with these databases, the one in ``OUTBOX_DATABASE_URL`` or an embedded one.

    ``folder``, ``settings`` and ``durable`` are those of `Server`; the user's own server ignores them. In a ``folder``,
    databases that are there already are used as they are.

    Raises:
        PostgresNotFound: no server named, and no binaries to run one.
        EmbeddedError: the server can't be started or reached, or a database can't be created.
    """
    chosen: ServerLike
    if url := os.environ.get(URL_VARIABLE):
        chosen = ExternalServer(url, progress=progress)
    else:
        chosen = Server(folder=folder, settings=settings, durable=durable, progress=progress)
    with chosen:
        for name in databases:
            if not chosen.has_database(name):
                chosen.create_database(name)
        yield chosen
