"""Whether a session or connection leads to the database of its Outbox: in another one nothing would dispatch a message.

Names tell without I/O. But two databases may have one name, as those of staging and production: so the server at an
address that isn't the Outbox's own is asked which it is, once a process, and so is the Outbox's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.database.dialect import check_driver
from outbox.database.engines import usable_anywhere
from outbox.database.execute import Statement, driver_of, execute, run_on
from outbox.errors import TransactionRequired
from outbox.text import database_address

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from outbox.database.execute import Row, Steps

#: Host (or the folder of the socket), port and name of a database.
Address = tuple[str | None, int, str | None]

_PORT = 5432

# A copy of a server has its system identifier, but another start, which is known to the microsecond.
_IDENTITY = Statement(
    "SELECT concat(extract(epoch FROM pg_postmaster_start_time()), '/', oid) FROM pg_database"
    " WHERE datname = current_database()"
)

_LOST = (
    "the message would be written where nothing dispatches it, or not at all; send with a session of the Outbox's "
    "database, or make an Outbox on the engine of the other one"
)


def address_of(driver: Any) -> Address:
    """Return where a driver's own connection leads to, as far as the driver tells."""
    if hasattr(driver, "is_in_transaction"):  # asyncpg's, which keeps it to itself: its versions may do so elsewhere
        address = getattr(driver, "_addr", None)
        host, port = address if isinstance(address, tuple) else (address, 0)
        return host, port, getattr(getattr(driver, "_params", None), "database", None)
    return driver.info.host, driver.info.port, driver.info.dbname


class OwnDatabase:
    """The database of an Outbox, by the engine that it is bound to. What that engine connects needs no check."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        url = engine.url
        # Without a host it is the engine's connect arguments that lead there.
        address = (url.host, url.port or _PORT, url.database)
        self._known: set[Address] = {address} if url.host and url.database else set()

    def check_name(self, engine: Engine) -> None:
        """Make sure, without I/O, that messages can be written through an engine, as far as its URL tells.

        Raises:
            InvalidSettings: its driver is none that messages can be sent through.
            TransactionRequired: it leads to a database of another name.
        """
        check_driver(engine.dialect)
        self._refuse_name(engine.url.database)

    def check(self, connection: Connection) -> None:
        """Make sure that a connection leads to this database.

        Raises:
            InvalidSettings, TransactionRequired: as of `check_name` and `checking`.
        """
        self.check_name(connection.engine)
        run_on(connection, self.checking(driver_of(connection)))

    def checking(self, driver: Any) -> Steps[None]:
        """Make sure that a driver's own connection leads to this database.

        Raises:
            TransactionRequired: it leads to another one.
        """
        address = address_of(driver)
        if address in self._known:
            return
        self._refuse_name(address[2])
        # At once after each other: a restart in between, which ends the transaction, would look like another server.
        ((theirs,),) = yield _IDENTITY
        ((ours,),) = yield self._ask
        if theirs != ours:
            raise TransactionRequired(
                f"the session or connection is on a database {address[2]!r} of another server than that of this Outbox "
                f"({database_address(self.engine.url)}): {_LOST}"
            )
        self._known.add(address)

    def _refuse_name(self, database: str | None) -> None:
        own = self.engine.url.database
        if own and database and own != database:
            raise TransactionRequired(
                f"the session or connection is on database {database!r}, but this Outbox is on {own!r}: {_LOST}"
            )

    def _ask(self) -> list[Row]:
        """Ask the Outbox's own database, on a connection that isn't kept."""
        with usable_anywhere(self.engine).connect() as connection:
            connection.detach()
            return execute(connection, _IDENTITY)[0]
