"""Which database: from options and environment to a connection; and ``outbox db``, which installs its tables."""

from __future__ import annotations

import datetime as dt
import enum
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer
from sqlalchemy import URL, Connection, Engine, QueuePool, make_url

from outbox.cli.options import URL_EXAMPLE, URL_VARIABLE, YesOption, command, confirm, find_url
from outbox.cli.output import Code, Failure, ListForm, Output, OutputOption, RowShape, print_as, print_rows, say, table
from outbox.database import engines, migration
from outbox.database.duty import PARTS
from outbox.database.execute import execute
from outbox.database.identity import follow, renew, source_identity
from outbox.database.identity import sources as sources_of
from outbox.database.migration import chain
from outbox.errors import DatabaseUnreached, pip_install
from outbox.message.content import NO_CODECS, Codecs
from outbox.operator.health import grants
from outbox.reader import environment, option, unknown_name, variable
from outbox.settings import Settings
from outbox.text import counted, described, feed_of

if TYPE_CHECKING:
    from outbox.message.topic import Topic
    from outbox.operator.operator import Operator

DATABASES_VARIABLE = "OUTBOX_CONSOLE_DATABASES"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)

_URL_HELP = (
    "The database, postgresql+psycopg://user@host/name. Default: OUTBOX_DATABASE_URL, the better place for a "
    "password, or the file that OUTBOX_DATABASE_URL_FILE names."
)
SCHEMA_HELP = "The schema of the outbox tables. Default: OUTBOX_SCHEMA, or outbox."


@dataclass(frozen=True, slots=True)
class DatabaseOptions:
    """Which database."""

    url: str | None = option(None, _URL_HELP, metavar="URL")
    schema: str | None = option(None, SCHEMA_HELP, metavar="NAME")

    @property
    def settings(self) -> Settings:
        """The settings of the environment, with the schema of the option."""
        return Settings.from_env(schema=self.schema or None)

    @property
    def address(self) -> URL:
        """The URL of the option or the environment; see `find_url`."""
        return find_url(self.url)

    @property
    def engine(self) -> Engine:
        """An engine on it; see `engine_of`."""
        return engine_of(self.address)

    def __str__(self) -> str:
        return described(self.address, self.settings.schema)


@dataclass(frozen=True, slots=True)
class _Environment:
    """What databases the environment names."""

    databases: list[tuple[str, str]] = option(factory=list, parse=engines.named_urls, secret=True)

    @classmethod
    def read(cls) -> _Environment:
        ours = {name: text for name, text in os.environ.items() if name.startswith(DATABASES_VARIABLE)}
        return cls(**environment(cls, DATABASES_VARIABLE.removesuffix("DATABASES"), ours))


@dataclass(frozen=True, slots=True)
class AllDatabasesOptions(DatabaseOptions):
    """Which databases."""

    database: tuple[str, ...] = option(
        (),
        "One more database, under a name; may be given again. Default: those of OUTBOX_CONSOLE_DATABASES, NAME=URL "
        "separated by blanks or lines. A password belongs there, or into ~/.pgpass.",
        metavar="NAME=URL",
    )

    @property
    def urls(self) -> dict[str, URL]:
        """The databases of the options, else of the environment, by name; two of them must not be one.

        The one of ``--url`` has the name of the database. It may be left out where others are named, and is the same as
        one of them where host, port, name and options are the same.
        """
        source = "--database" if self.database else DATABASES_VARIABLE
        databases: dict[str, URL] = {}
        names: dict[str, str] = {}
        for own_name, url in map(engines.named_url, self.database) if self.database else _Environment.read().databases:
            if "://" not in url:
                shown = f"{own_name}=…" if own_name else url
                raise Failure(f"{source} {shown!r} must be NAME=URL, such as shop={URL_EXAMPLE}")
            address = find_url(url)
            name = own_name or address.database or ""
            if not _NAME.fullmatch(name):
                raise Failure(f"{source}: {name!r} can't be the name of a database here; write NAME=URL")
            if name in databases:
                raise Failure(f"{source}: two databases have the name {name!r}")
            if (other := names.setdefault(engines.address_of(address), name)) != name:
                raise Failure(f"{source}: {other!r} and {name!r} are one database; leave one out")
            databases[name] = address
        if databases and not self.url and not variable(URL_VARIABLE):
            return databases
        own = self.address
        if engines.address_of(own) in names:
            return databases
        name = own.database or "database"
        if name in databases:
            raise Failure(f"{source}: the name {name!r} is that of the database of --url")
        return {name: own, **databases}

    @contextmanager
    def opened(
        self,
        *,
        codecs: Codecs = NO_CODECS,
        topics: Mapping[str, Topic[Any]] | None = None,
        partly: bool = False,
        **more: URL | None,
    ) -> Iterator[Operator]:
        """Give the operator layer over all of them, and over ``more`` by name; close their connections in the end.

        ``partly``: also where only some can be reached, for a command that shows what these know.

        Raises:
            DatabaseUnreached: (at the end) some couldn't be reached, so that not all was shown.
        """
        from outbox.operator.databases import Databases  # noqa: PLC0415 - needed by this command alone
        from outbox.operator.operator import Operator  # noqa: PLC0415 - needed by this command alone

        urls = self.urls | {name: url for name, url in more.items() if url is not None}
        with ExitStack() as stack:
            engines = {name: engine_of(url, keep=True) for name, url in urls.items()}
            for engine in engines.values():
                stack.callback(engine.dispose)
            databases = Databases.open(engines, self.settings, partly=partly)
            yield Operator(databases, codecs=codecs, topics=topics)
            if databases.away:
                raise DatabaseUnreached(list(databases.away))

    def again(self, command: str) -> str:
        """Return a command as it can be typed again with the same databases; passwords are left out."""
        names = map(engines.named_url, self.database)
        typed = [("--database", f"{name}=" * bool(name) + _without_password(url)) for name, url in names]
        typed += [("--url", _without_password(self.url))] if self.url is not None else []
        typed += [("--schema", self.schema)] if self.schema is not None else []
        return " ".join(["outbox", command, *(f"{name} {shlex.quote(text)}" for name, text in typed)])


@dataclass(frozen=True, slots=True)
class DatabasesOptions(AllDatabasesOptions):
    """Which databases, and of several only one."""

    only: str | None = option(None, "Of several databases: only the one of this name.", aliases=("in",), metavar="NAME")

    def show(self, rows: Callable[[Operator], Iterable[Any]], shape: RowShape[Any], form: ListForm) -> None:
        """Print rows of the databases that can be reached, each with its database where there are several."""
        with self.opened(partly=True) as operator:
            found = [row for row in rows(operator) if self.only in {None, row.database}]
            print_rows(found, shape, form, databases=len(operator.databases) > 1)


def _without_password(url: str) -> str:
    # `URL.set` leaves the password as it is where the new one is None.
    return str(make_url(url).difference_update_query(["password", "sslpassword"])).replace(":***@", "@")


@contextmanager
def opened(url: URL, settings: Settings) -> Iterator[tuple[Connection, frozenset[str]]]:
    """Open a connection to a migrated database; yield it with the parts (``producer``, ``consumer``) found there."""
    from outbox.operator.databases import open_database  # noqa: PLC0415 - needed by this command alone

    database = open_database(str(url.database), engine_of(url), settings)
    with database.engine.connect() as connection:
        yield connection, database.parts


def engine_of(url: URL, *, keep: bool = False) -> Engine:
    """Return an engine that doesn't wait for a host for ever, and keeps connections only with ``keep``."""
    pool: dict[str, Any] = {"pool_size": 2, "pool_pre_ping": True, "poolclass": QueuePool} if keep else {}
    try:
        return engines.engine_of(url, name="outbox cli", **pool)
    except ImportError as error:
        raise Failure(f"the driver can't be loaded: {error}; {pip_install('binary')}", Code.CONFIG) from error


def now_at(operator: Operator) -> dt.datetime:
    """Return the time of the first database's clock."""
    from outbox.database.execute import execute  # noqa: PLC0415 - needed by this command alone
    from outbox.database.sql import NOW  # noqa: PLC0415 - needed by this command alone

    database = next(iter(operator.databases.values()))
    with database.read_only() as connection:
        ((time,),) = execute(connection, NOW)[0]
    return time  # type: ignore[no-any-return]  # rows have no types


# --- outbox db -------------------------------------------------------------------------------------------------------

app: typer.Typer = typer.Typer(
    help="Install, remove and compare the outbox tables.\n\n"
    "The tables live in a schema and have a version table of their own, so your own migrations never see them. "
    "A database that only sends needs the part `producer`, one that only consumes the part `consumer`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class SchemaPart(enum.StrEnum):
    """A part of the schema, by the side that needs it."""

    PRODUCER = enum.auto()
    CONSUMER = enum.auto()


PartOption = Annotated[
    list[SchemaPart] | None,
    typer.Option(
        metavar="producer|consumer",
        help="Only this part; may be given twice. Default: the parts that are installed, or both where none is.",
    ),
]
LockTimeoutOption = Annotated[
    float,
    typer.Option(
        min=0.001,
        metavar="SECONDS",
        help="How long to wait for the locks on the tables, beside workers and senders that use them.",
    ),
]


@command(app)
def upgrade(database: DatabaseOptions, part: PartOption = None, lock_timeout: LockTimeoutOption = 5.0) -> None:
    """Install the tables, or bring them up to date.

    Safe to run any number of times, and from several places at once. Without --part it upgrades the parts that the
    database has, and installs both in a database that has none.

    \b
    Examples:
      outbox db upgrade --url postgresql+psycopg://me@localhost/shop
      outbox db upgrade --part consumer
    """
    done = migration.upgrade(
        database.engine, part or None, database.settings.schema, lock_timeout=lock_timeout, say=say
    )
    say(f"{_listed('installed', done)} in {database}")


@command(app)
def downgrade(
    database: DatabaseOptions, part: PartOption = None, lock_timeout: LockTimeoutOption = 5.0, yes: YesOption = False
) -> None:
    """Remove the tables, with all messages in them.

    \b
    Example:
      outbox db downgrade --part consumer
    """
    parts = part or list(SchemaPart)
    what = f"the {' and '.join(parts)} tables in {database}"
    confirm(f"Remove {what}, with all messages in them?", f"not removing {what}", yes=yes)
    done = migration.downgrade(database.engine, parts, database.settings.schema, lock_timeout=lock_timeout, say=say)
    say(f"{_listed('removed', done)} in {database}")


@command(app)
def new_source(database: DatabaseOptions, yes: YesOption = False) -> None:
    """Give a producer's database that is a copy of another one an id of its own.

    Consumers know by that id which database they read a topic from. A dump, a replica and a volume keep it, as they
    must after a fail-over. Of a copy that lives on beside its original, such as a staging database, consumers would
    take each for the other. What is consumed in the same database goes on where it was. A consumer's database that was
    copied with it learns the new id by `outbox db follow-source`.

    \b
    Example:
      outbox db new-source --url postgresql+psycopg://me@localhost/staging
    """
    confirm(f"Give {database} an id of its own?", f"not giving {database} an id of its own", yes=yes)
    with database.engine.begin() as connection:
        old, new = renew(connection, database.settings.schema)
    say(f"{database} is source {new} now; it was {old}. A copied consumer: outbox db follow-source {old} {new}")


@command(app)
def follow_source(database: DatabaseOptions, old: UUID, new: UUID) -> None:
    """Have the groups of a consumer's database that was copied with its producer's know that one by its new id.

    \b
    Example:
      outbox db follow-source 0b9f0a7e-3f57-4d0e-8a6e-2f4a1f0b7c11 6a1f9c3e-58a8-4a53-9f54-0d1c2b3a4e5f
    """
    with database.engine.begin() as connection:
        known = follow(connection, database.settings.schema, old, new)
    if not known:
        raise Failure(f"{database} has read no topic from a source {old}; see outbox db sources", Code.NOT_FOUND)
    say(f"{database} knows source {old} as {new} now, and goes on where it was")


@command(app)
def sources(database: DatabaseOptions, output: OutputOption = Output.TABLE) -> None:
    """Show which source this database is, and from which ones its groups read."""
    schema, installed = database.settings.schema, migration.current(database.engine, database.settings.schema)
    with database.engine.connect() as connection:
        own = execute(connection, source_identity(schema))[0][0] if installed.get("producer") else (None, None)
        met = execute(connection, sources_of(schema))[0] if installed.get("consumer") else []
    document = {
        "id": own[0] and str(own[0]),
        "sources": [{"topic": feed_of(topic, number), "id": str(id_), "address": at} for topic, number, id_, at in met],
    }
    rows = [("this database", own[0] or "no producer", own[1] or "")]
    rows += [(feed_of(topic, number), id_, at or "") for topic, number, id_, at in met]
    print_as(output, document, table(("topic", "source", "address"), rows))


@command(app)
def current(database: DatabaseOptions, output: OutputOption = Output.TABLE) -> None:
    """Show the versions of the tables and of this code."""
    revisions = migration.current(database.engine, database.settings.schema)
    document = {branch: {"database": found, "code": chain.head(branch)} for branch, found in revisions.items()}
    rows = [(branch, found or "not installed", chain.head(branch)) for branch, found in revisions.items()]
    print_as(output, document, table(("part", "database", "code"), rows))


@command(app)
def check(database: DatabaseOptions, part: PartOption = None, output: OutputOption = Output.TABLE) -> None:
    """Compare the tables with what this code expects.

    Columns, defaults, constraints, and indexes with their conditions are compared, of the parts which are
    installed (or, with --part, of those which should be). The exit code is 6 if anything differs. Nothing is
    changed, but the privilege to make temporary tables is needed.
    """
    differences = migration.check(database.engine, part or None, database.settings.schema)
    rows = [table(("difference",), [(difference,) for difference in differences])] if differences else []
    print_as(output, {"differences": differences}, *rows)
    if differences:
        raise Failure(f"{counted(len(differences), 'difference')} in {database}", Code.PROBLEMS)
    say(f"no differences in {database}")


@command(app, "sql")
def show_sql(
    schema: Annotated[str | None, typer.Option(metavar="NAME", help=SCHEMA_HELP)] = None,
    part: PartOption = None,
    from_: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="REVISION", help="Where the tables are, as `outbox db current` shows it."),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="REVISION", help="Where they are to be. Default: the newest revisions of this code."),
    ] = None,
) -> None:
    """Print the SQL that installs the tables, or leads from one revision to another.

    For a database that no program may change. Without --from it is for an empty database. --from and --to may be given
    again, once for each part.

    \b
    Examples:
      outbox db sql --part producer > outbox.sql
      outbox db sql --from producer_0001 --to producer_0002 | psql shop
    """
    name = Settings.from_env(schema=schema or None).schema
    lines = migration.statements(from_ or (), to, parts=part, schema=name)
    title = f"the outbox from {', '.join(from_ or ['nothing'])} to {', '.join(to or ['the newest'])}"
    _print_sql(title, "BEGIN", *lines, "COMMIT")


_ROLES_HELP = "; ".join(f"{role.name}: {role.help}" for role in grants.ROLES.values())


def check_role(name: str) -> str:
    """Return the name of one of `grants.ROLES`."""
    if name not in grants.ROLES:
        raise Failure(unknown_name(name, grants.ROLES, "--role "))
    return name


@command(app, "grants")
def show_grants(
    role: Annotated[str, typer.Option(metavar="|".join(grants.ROLES), help=f"The use of the role. {_ROLES_HELP}.")],
    to: Annotated[str, typer.Option(metavar="NAME", help="The role of PostgreSQL that gets the privileges.")],
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            help="Let it see messages of this topic only; may be given again. By row security.",
        ),
    ] = None,
    schema: Annotated[str | None, typer.Option(metavar="NAME", help=SCHEMA_HELP)] = None,
    part: Annotated[
        list[SchemaPart] | None,
        typer.Option(metavar="producer|consumer", help="Only what it needs in the database of this part."),
    ] = None,
) -> None:
    """Print the GRANTs that a role needs, and no more.

    For the owner of the tables to run: one part in the producer's database, one in the consumer's; where both are one
    database, both. This command itself connects to nothing.

    \b
    Examples:
      outbox db grants --role producer --to shop
      outbox db grants --role consumer --to mailer --topic order-created
    """
    if topic and check_role(role) != "consumer":
        raise Failure(f"--topic keeps a consumer to some topics; it isn't for --role {role}")
    if not to.isprintable() or not to:
        raise Failure(f"--to {to!r} can't be the name of a role")
    name, member_of = (
        Settings.from_env(schema=schema or None).schema,
        ", ".join(grants.ROLES[check_role(role)].member_of),
    )
    for each in PARTS:
        lines = list(grants.statements(role, to, each, name, topic or ()))
        if lines and (not part or each in part):
            title = f"{to} as {role}, in the {each}'s database"
            _print_sql(title, "BEGIN", "SET LOCAL lock_timeout = '5s'", *lines, "COMMIT")
    if member_of:
        title = f"{to} as {role}: to see other roles' sessions, by a superuser"
        _print_sql(title, f"GRANT {member_of} TO {grants.quoted(to)}")


def _print_sql(title: str, *statements: str) -> None:
    sys.stdout.write("".join([f"-- {title}\n", *(f"{statement};\n" for statement in statements), "\n"]))


def _listed(done: str, revisions: list[str]) -> str:
    return f"{done} {', '.join(revisions)}" if revisions else "nothing to do"
