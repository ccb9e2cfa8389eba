"""A PostgreSQL server for the demo, the tests and a first look; not for production.

::

    with embedded.server(["bank"]) as postgres:
        engine = create_engine(postgres.url("bank"))

It takes the server in ``OUTBOX_DATABASE_URL`` if there is one. Otherwise it starts one of its own from the
PostgreSQL binaries of the machine or of a wheel (the extra ``embedded``), and stops it again however this process ends.
"""

from outbox.embedded.binaries import Binaries, find_binaries
from outbox.embedded.choice import server
from outbox.embedded.external import ExternalServer
from outbox.embedded.own import Server
from outbox.embedded.server import ServerLike

__all__ = [
    "Binaries",
    "ExternalServer",
    "Server",
    "ServerLike",
    "find_binaries",
    "server",
]
