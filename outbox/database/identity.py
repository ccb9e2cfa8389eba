"""Which database this is: that of an Outbox, and, for those that read from it, which source.

**The database of an Outbox.** In another one nothing would dispatch a message. Names tell without I/O. But two
databases may have one name, as those of staging and production: so the server at an address that isn't the Outbox's own
is asked which it is, once a process, and so is the Outbox's.

**Sources.** From which producer's database a group reads is a part of the identity of all that it keeps. Each has an id
of its own, which the first migration draws. Dumps and replicas keep it, as they keep the messages; a copy that lives on
beside its original is given a new one (`renew`). A consumer's database numbers the sources of each topic in the order
in which its groups meet them, in ``message_source``.

The topic of one source is a **feed**: ``orders`` is that of the first source, ``orders@1`` that of the next one. All
that a consumer keeps of a topic, it keeps of a feed: offsets, the inbox, starts, losses, settled ranges. So one topic
name from two sources never mixes, and of a single source nothing is longer than its topic. What holds a group back, its
pause, rate and breaker, is kept of the topic: it holds for all sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from outbox.database.dialect import check_driver
from outbox.database.engines import usable_anywhere
from outbox.database.execute import Statement, Template, driver_of, execute, lock_key, read_source, run_on
from outbox.database.session import begin
from outbox.database.sql import take_lock
from outbox.errors import ActRefused, TransactionRequired
from outbox.text import database_address, feed_among, feed_of

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


# --- sources -------------------------------------------------------------------------------------------

# The server tells where it is: by which alias, pooler or proxy one came doesn't matter. A socket has no address.
#: Read which source a producer's database is, and where it is; None on a standby. One row: ``(id, address)``.
source_identity: Template = Template("""
SELECT {s}.source_id(),
       CASE WHEN NOT pg_is_in_recovery()
            THEN concat(coalesce(host(inet_server_addr()), 'local'), ':', current_setting('port'), '/',
                        current_database(), ' of system ', system_identifier) END
  FROM pg_control_system()
""")

#: Read the source of an id, as a consumer's database knows it for a topic. Rows: ``(number, address)`` or none.
_KNOWN = Template("SELECT number, address FROM {s}.message_source WHERE topic = %s AND id = %s")

#: Read all sources. Rows: ``(topic, number, id, address)``.
sources: Template = Template("SELECT topic, number, id, address FROM {s}.message_source ORDER BY 1, 2")

#: Read the sources of a topic. Rows: ``(number, id)``.
NUMBERS: Template = Template("SELECT number, id FROM {s}.message_source WHERE topic = %s")

#: Number a source that is new for a topic, or note that it is elsewhere.
_NOTE = Template("""
INSERT INTO {s}.message_source AS k (topic, number, id, address)
SELECT %(topic)s, coalesce(max(number) + 1, 0), %(id)s, %(address)s FROM {s}.message_source WHERE topic = %(topic)s
ON CONFLICT (id, topic) DO UPDATE SET address = excluded.address, met_at = clock_timestamp()
RETURNING number
""")

_RENEW = Template("SELECT {s}.renew_source_id()")
_CONSUMES = Template("SELECT to_regclass('{s}.message_source') IS NOT NULL")
_FOLLOW = Template("UPDATE {s}.message_source SET id = %(new)s WHERE id = %(old)s RETURNING number")


class Source(NamedTuple):
    """A producer's database, as a consumer's has met it. ``before`` is where it was, if that is elsewhere."""

    number: int
    id: UUID
    address: str
    before: str | None


def meet(connection: Connection, source: Connection, schema: str, topic: str) -> Source:
    """Return which source of a topic a producer's database is; number it, if no group has read the topic from it.

    Neither connection is in a transaction, unless the caller's is to be rolled back.
    """
    ((id_, address),) = read_source(source, source_identity(schema))[0]
    (rows,) = read_source(connection, _KNOWN(schema, topic, id_))
    number, before = rows[0] if rows else (None, address)
    if number is None or (address is not None and address != before):
        with begin(connection):
            # Of two workers that meet new sources at once, each gets a number of its own.
            lock = take_lock(lock_key("sources", schema, topic))
            _, ((number,),) = execute(connection, lock, _NOTE(schema, topic=topic, id=id_, address=address))
    return Source(number, id_, address or "", before if address and before != address else None)


def feed_from(connection: Connection, schema: str, topic: str, source_id: UUID) -> str:
    """Return the feed that a consumer's database has of a source's topic; of a source that it hasn't met, a new one."""
    (rows,) = read_source(connection, NUMBERS(schema, topic))
    return feed_among(rows, topic, source_id)


def renew(connection: Connection, schema: str) -> tuple[UUID, UUID]:
    """Give a producer's database, a copy of another one, an id of its own, in the running transaction.

    The groups that read it in the same database go on where they were. Return the former id and the new one.
    """
    ((old, _),) = execute(connection, source_identity(schema))[0]
    ((new,),), ((consumes,),) = execute(connection, _RENEW(schema), _CONSUMES(schema))
    if consumes:
        follow(connection, schema, old, new)
    return old, new


def follow(connection: Connection, schema: str, old: UUID, new: UUID) -> bool:
    """Have a consumer's database know a source by its new id, in the running transaction; False if it never met it.

    Raises:
        ActRefused: a group has read from the new one already.
    """
    (feeds,) = execute(connection, sources(schema))
    if met := ", ".join(feed_of(topic, number) for topic, number, id_, _ in feeds if id_ == new):
        raise ActRefused(
            f"source {new} is another one here already, as {met}: a worker has met it before this; what it has read "
            "of it is there, and stays"
        )
    return bool(execute(connection, _FOLLOW(schema, old=old, new=new))[0])
