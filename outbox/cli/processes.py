"""Commands that go on until they are ended or done: ``outbox run``, ``outbox console``, ``outbox demo``."""

from __future__ import annotations

import contextlib
import enum
import getpass
import importlib
import inspect
import secrets
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from operator import attrgetter
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import outbox
from outbox.cli.database import AllDatabasesOptions, DatabaseOptions
from outbox.cli.options import CodecsOption, gathered, options_of, read_options
from outbox.cli.output import (
    Code,
    Failure,
    Output,
    OutputOption,
    as_failure,
    needing,
    one_line,
    print_json,
    print_line,
    say,
)
from outbox.database.duty import ROLES
from outbox.errors import InvalidSettings, NotBound
from outbox.message.content import NO_CODECS, Codecs
from outbox.reader import option
from outbox.reconcile.job import EngineName
from outbox.settings import ConsoleServer
from outbox.telemetry.logs import LogFormat, configure
from outbox.text import named

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from outbox.app import Outbox
    from outbox.message.topic import Topic
    from outbox.worker import Worker
    from outbox.worker.supervisor import SupervisedWorker


class LogLevel(enum.StrEnum):
    """How much is logged."""

    DEBUG = enum.auto()
    INFO = enum.auto()
    WARNING = enum.auto()
    ERROR = enum.auto()


LogLevelOption = Annotated[
    LogLevel | None, typer.Option(help="How much to tell on stderr. Default: info, or as your application says.")
]
LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option(help="Text, or one JSON object a line. Default: text, or as your application says."),
]


def set_up_log(log_format: LogFormat | None, log_level: LogLevel | None) -> None:
    """Have the log written to stderr as the options say."""
    configure(log_format, None if log_level is None else log_level.upper())


def run(
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            envvar="OUTBOX_APP",
            metavar="MODULE:OBJECT",
            help="Where your Outbox is, such as shop.messages:outbox; or a list or dict of several; or shop:make(), a "
            "function that returns it. The module must import your consumers.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="In place of --app: the database of services that have no Python. The worker dispatches, releases, "
            "prunes and carries out bulk jobs there; it consumes and checks nothing.",
        ),
    ] = None,
    bind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="The database of an Outbox that has none when it is imported; several, each with a name, are tenants.",
        ),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE,…",
            help=f"Only these of: {', '.join(ROLES)}. Default: all there is work for.",
        ),
    ] = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Serve /metrics, /healthz and /readyz there; :PORT is every address. Default: no."
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            envvar="OUTBOX_PROCESSES",
            min=1,
            max=256,
            metavar="N",
            help="Worker processes; more than one are started, and started again when they die. Default: 1, this one.",
        ),
    ] = 1,
) -> None:
    """Run a worker: dispatch, check, consume, retry, prune, reconcile, carry out what operators order.

    It runs until it is stopped. Run as many as you like, on as many machines. SIGTERM or Ctrl-C ends it
    in good order: running handlers are waited for (OUTBOX_DRAIN_TIMEOUT, seconds); a second one ends it at once.

    With --processes N, N workers share the processors of this machine. One that dies is started again, one that
    hangs (OUTBOX_HANG_TIMEOUT) ends. Each serves --http at a port of its own: the second one at PORT + 1.

    \b
    Examples:
      outbox run --app shop.messages:outbox
      outbox run --app shop.messages:outbox --roles dispatch,release,prune
      outbox run --url postgresql+psycopg://me@localhost/shop
      outbox run --app shop.messages:outbox --log-format json --http :9100 --processes 4
      outbox run --app shop.messages:outbox --bind north=postgresql://me@db1/shop --bind south=postgresql://me@db2/shop
    """
    if app is None and url is None:
        raise Failure("no application: give --app MODULE:OBJECT; or --url, where services speak SQL only")
    if url is not None and (app or bind):
        raise Failure("--url is for a database without an application; give --bind URL with --app")
    choices = WorkerChoices(app, tuple(bind or ()), roles, log_level, log_format, url, http)
    if processes == 1:
        worker = _worker_of(choices)
        with observed(worker, http):
            raise typer.Exit(worker.run())
    set_up_log(log_format, log_level)
    from outbox.worker.supervisor import Supervisor  # noqa: PLC0415 - needed by this command alone

    code, hindrance = Supervisor(partial(_work, choices), processes).run()
    if hindrance is not None:
        say(f"error: {hindrance}")
    raise typer.Exit(code)


#: The roles of a worker for a database whose services speak SQL only.
_WITHOUT_APPLICATION = "dispatch,release,prune,bulk"


@dataclass(frozen=True, slots=True)
class WorkerChoices:
    """The options of a worker, as they were typed."""

    app: str | None
    binds: tuple[str, ...]
    roles: str | None
    log_level: LogLevel | None
    log_format: LogFormat | None
    url: str | None
    http: str | None


def _worker_of(choices: WorkerChoices) -> Worker:
    """Import the application; return a worker for it, which is not started."""
    roles = choices.roles
    if choices.app is not None:
        outboxes = bound(choices.app, load_all(choices.app), choices.binds)
    else:
        database = DatabaseOptions(choices.url)
        outboxes, roles = [outbox.Outbox(database.engine, settings=database.settings)], roles or _WITHOUT_APPLICATION
    set_up_log(choices.log_format, choices.log_level)
    from outbox.worker import Worker  # noqa: PLC0415 - needed by this command alone

    names = None if roles is None else [role.strip() for role in roles.split(",") if role.strip()]
    return Worker(*outboxes, roles=names)


def be_supervised(link: Connection, run: Callable[[SupervisedWorker], int]) -> NoReturn:
    """Be one of several processes, until its end: what can't begin is told to the supervisor."""
    from outbox.worker.supervisor import SupervisedWorker  # noqa: PLC0415 - needed by several processes alone

    supervised = SupervisedWorker(link)
    try:
        code = run(supervised)
    except Exception as error:
        failure = as_failure(error)
        if failure is None:
            raise
        supervised.tell(str(failure))
        code = failure.code
    sys.exit(code)


def _work(choices: WorkerChoices, number: int, link: Connection) -> None:
    """Be one of several worker processes, until its end."""

    def run(supervised: SupervisedWorker) -> int:
        worker = _worker_of(choices)
        with observed(worker, choices.http, number - 1):
            return supervised.run(worker)

    be_supervised(link, run)


@contextlib.contextmanager
def observed(worker: Any, http: str | None, offset: int = 0) -> Iterator[None]:
    """Serve the probes and metrics of a worker or server, if there is an address for it, so many ports higher."""
    with contextlib.ExitStack() as stack:
        if http is not None:
            from outbox.worker import probes  # noqa: PLC0415 - needed by this command alone

            host, port = address(http, offset)
            try:
                stack.enter_context(probes.serving(worker, host, port))
            except OSError as error:
                reason = f"--http {http}: {error.strerror or error}"
                raise Failure(f"{reason} (port {port})" if offset else reason, Code.CONFIG) from error
        yield


def address(text: str, offset: int = 0) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, so many ports higher; ``:PORT`` is every address of this machine.

    Raises:
        InvalidSettings: it is neither, or there is no such port.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) + offset > 65535:
        raise InvalidSettings(f"{text!r} must be HOST:PORT, such as 127.0.0.1:9100, or :9100 for every address")
    return host.strip("[]"), int(port) + offset


def bound(path: str, outboxes: list[Outbox], binds: Sequence[str]) -> list[Outbox]:
    """Return the Outboxes with their databases; with several databases, one for each of them."""
    from sqlalchemy import QueuePool  # noqa: PLC0415 - needed by this command alone

    from outbox.database.engines import engine_of, named_url  # noqa: PLC0415 - needed by this command alone

    engines = {name or url: engine_of(url, poolclass=QueuePool) for name, url in map(named_url, binds)}
    if engines and len(outboxes) > 1:
        raise Failure(f"--bind is for one Outbox, and --app {path!r} has {len(outboxes)}", Code.CONFIG)
    if len(engines) > 1:
        return [outboxes[0].bound_to(engine) for engine in engines.values()]
    try:
        for engine in engines.values():
            outboxes[0].bind(engine)
        for outbox in outboxes:
            _ = outbox.engine
    except NotBound:
        raise Failure(
            f"--app {path!r} has no database yet: give --bind URL, or name a function that makes your application and "
            "returns its Outbox, such as --app 'shop.app:make_outbox()'",
            Code.CONFIG,
        ) from None
    return outboxes


def load(path: str) -> Outbox:
    """Import ``module:object``, from the current directory too; return the Outbox."""
    outboxes = load_all(path)
    if len(outboxes) > 1:
        raise Failure(f"--app {path!r} has {len(outboxes)} Outboxes, and this command takes one", Code.CONFIG)
    return outboxes[0]


def load_all(path: str) -> list[Outbox]:
    """Import ``module:object``, which may be several Outboxes, or ``module:function()``, which is called."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise Failure(f"--app {path!r} must be MODULE:OBJECT, such as shop.messages:outbox", Code.CONFIG)
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise Failure(_cannot_import(path, module_name, error), Code.CONFIG) from error
    from outbox.app import Outbox  # noqa: PLC0415 - needed by this command alone

    try:
        found = attrgetter(attribute.removesuffix("()"))(module)
    except AttributeError:
        there = sorted(f"{module_name}:{name}" for name, value in vars(module).items() if isinstance(value, Outbox))
        hint = f"it has {', '.join(there) or 'no Outbox'}"
        raise Failure(f"--app {path!r}: {module_name} has no {attribute!r}; {hint}", Code.CONFIG) from None
    if attribute.endswith("()"):
        try:
            found = found()
        except Exception as error:
            raise Failure(_cannot_import(path, module_name, error), Code.CONFIG) from error
    several = (
        list(found.values() if isinstance(found, Mapping) else found) if isinstance(found, Collection) else [found]
    )
    if wrong := [each for each in several if not isinstance(each, Outbox)]:
        hint = ", not an Outbox"
        if inspect.isfunction(found):
            hint += f"; to have it called, write {path}()"
        raise Failure(f"--app {path!r} is a {type(wrong[0]).__name__}{hint}", Code.CONFIG)
    if not several:
        raise Failure(f"--app {path!r} is empty: there is no Outbox in it", Code.CONFIG)
    return several


def load_quietly(path: str) -> Outbox:
    """Import an Outbox; what the application prints then must not get among our data."""
    with contextlib.redirect_stdout(sys.stderr):
        return load(path)


def named_app(path: str | None) -> Outbox:
    """Import an Outbox as `load_quietly` does; say so where none is named."""
    if path is None:
        raise Failure("say where your Outbox is: --app MODULE:OBJECT (or OUTBOX_APP)", Code.USAGE)
    return load_quietly(path)


@dataclass(frozen=True, slots=True)
class Declared:
    """Hold an application's declarations of bodies: how they are read, and the model of each topic."""

    codecs: Codecs
    topics: Mapping[str, Topic[Any]]


def declared_by(path: str | None) -> Declared:
    """Import an Outbox as `load_quietly` does, if one is named; return its declarations of bodies."""
    if path is None:
        return Declared(NO_CODECS, {})
    outbox = load_quietly(path)
    return Declared(outbox.codecs, outbox.topics)


def _cannot_import(path: str, module_name: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or "\0"):
        return f"--app {path!r}: there is no module {error.name!r} in {Path.cwd()} or in PYTHONPATH"
    message = f"--app {path!r} can't be imported: {one_line(named(error))}"
    frames = extract_tb(error.__traceback__)
    return f"{message} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else message


@dataclass(frozen=True, slots=True)
class DemoChoices:
    """The options of the demo; see the example's own options."""

    orders: Path | None = option(None, "Payment orders, PKDD'99 format. Default: generated ones.", metavar="FILE")
    accounts: Path | None = option(None, "The account ids that bank A knows. Default: all senders.", metavar="FILE")
    opening_balance: str | None = option(
        None, "What each account of bank A begins with. Default: what its orders need.", metavar="AMOUNT"
    )
    transfers: int = option(1000, "How many orders to generate.")
    producers: int = option(2, "Processes of bank A.")
    consumers: int = option(2, "Processes of bank B.")
    crash: bool = option(False, "Kill processes at random, and close accounts while transfers are on their way.")
    kills: int | None = option(None, "How many to kill; implies --crash. Default: 30.")
    via: str | None = option(None, "Between the banks: kafka, rabbitmq, nats, redis, webhook.", metavar="KIND")
    two_phase: bool = option(False, "Prepare a half message before each debit; a fence decides the orphans.")
    tcc: bool = option(False, "Reserve, then confirm or cancel; a checker decides the orphans.")
    faults: bool = option(False, "Damage the tables of both banks after the work; all is found and mended.")
    reconcile: bool = option(True, "Compare the tables of the banks at the end.")
    engine: EngineName = option(EngineName.AUTO, "What compares them; auto: Spark if it is installed.")
    report: Path | None = option(None, "Write the reconciliation's HTML page.", metavar="FILE")
    console: bool = option(False, "Keep the banks open after the work, with the admin console over both.")
    console_port: int = option(8900, "The port of the console.", metavar="PORT")
    seed: int = option(1, "Of the generated orders, the kills and the faults.")
    strict: bool = option(False, "Exit with 1 if an order was refused.")


@gathered
def demo(choices: DemoChoices, output: OutputOption = Output.TABLE) -> None:
    """Transfer money between two banks, reconcile them, audit every cent.

    Each bank has a database. They run on a PostgreSQL of their own that is gone afterwards, or on the server in
    OUTBOX_DATABASE_URL. The exit code is 1 if anything is missing, doubled, or undecided. Needs the extra "demo"; with
    "demo-spark" installed, the reconciliation runs on Spark.

    At the end the message tables and ledgers of the two banks are reconciled. With --faults they are damaged before:
    the report tells the findings, the repairs, and the mends by an operator.

    With --crash, processes are killed, and accounts of bank B closed between bank A's inquiry and its debit. Each
    transfer ends as credited or refunded all the same, without an operator.

    With --via neither bank can reach the other's database: bank A relays its transfers to a broker or an endpoint, bank
    B takes them in, and answers the same way. With --crash the broker is killed too, and a proxy loses what it answers.

    With --console the banks stay open when the work is done, until Ctrl-C: some accounts of bank B were closed, and
    nothing is refunded by itself, so that there are parked transfers to be found in the admin console, and to be
    refunded or retried.

    With --two-phase or --tcc, kills and stalls are aimed at the moments between a half message and its decision. The
    report says how each orphan was decided.

    \b
    Examples:
      outbox demo
      outbox demo --transfers 5000 --crash
      outbox demo --crash --faults --report report.html
      outbox demo --console
      outbox demo --two-phase --crash
      outbox demo --crash --via nats
      outbox demo --tcc --crash --orders orders.csv
    """
    # The example is inside the installed package, and beside it in a checkout.
    package, name = Path(outbox.__file__).resolve().parent, "examples.bank_transfer.demo"
    if (package / "examples" / "bank_transfer").is_dir():
        name = f"outbox.{name}"
    else:
        sys.path.insert(0, str(package.parent))
    with needing("outbox demo", "demo"):
        module = importlib.import_module(name)
    balance = choices.opening_balance
    try:
        amount = None if balance is None else Decimal(balance)
        options = module.DemoOptions(**{**asdict(choices), "opening_balance": amount}, json=output is Output.JSON)
    except InvalidOperation:
        raise Failure(f"--opening-balance {balance!r} is not an amount") from None
    except ValueError as error:
        raise Failure(str(error)) from None
    raise typer.Exit(module.run(options))


# --- outbox console --------------------------------------------------------------------------------------------------

app: typer.Typer = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


class RoleName(enum.StrEnum):
    """Name the role of a user of the console."""

    VIEWER = enum.auto()
    OPERATOR = enum.auto()
    ADMIN = enum.auto()


RoleOption = Annotated[
    RoleName, typer.Option(help="What the user may do: see; act; decide, compensate, see bodies as well.")
]


def serve(
    context: typer.Context,
    databases: AllDatabasesOptions,
    server: Any,
    app: CodecsOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Serve the admin console: pages and HTTP endpoints to see every message, and to heal stuck ones.

    It runs until Ctrl-C or SIGTERM. It needs no code of yours, but for the codecs of bodies that you wrote (--app);
    compensations and checks are done by workers.

    Without any configuration it prints a token for this run, to log in with. Users and tokens come from the
    environment or files, never from options (see `hash-password` and `token`); without them it serves this machine
    only. In front of others put a proxy with TLS.

    What operators do, logins, and requests that are denied or fail are told on stderr (--log-level, --log-format).

    \b
    Environment, each also with OUTBOX_CONSOLE_ before it, secrets also with _FILE after it:
      DATABASES      NAME=URL, separated by blanks or lines
      USERS, TOKENS  NAME:ROLE:HASH, as `hash-password` and `token` print them
      SESSION_KEY    makes sessions outlive a restart
      HOST, PORT, READ_ONLY, ENV, ALLOWED_HOSTS, TRUSTED_PROXIES, ROOT_PATH  as the options
      TRUSTED_ORIGINS, USER_HEADER, USER_ROLES, USER_DEFAULT_ROLE            behind a proxy that logs people in
      PAYLOAD        hidden, masked (default) or full: how bodies are shown
      METRICS        off (default), authenticated or open: /metrics for Prometheus
    \b
    Examples:
      outbox console --url postgresql+psycopg://me@localhost/shop
      outbox console --database a=postgresql+psycopg://me@db/bank_a --database b=postgresql+psycopg://me@db/bank_b
      OUTBOX_CONSOLE_USERS_FILE=/etc/outbox/users outbox console --host 0.0.0.0 --allow-host ops.example.com
    """
    if context.invoked_subcommand is not None:
        return
    with needing("outbox console", "console"):
        import uvicorn  # noqa: F401, PLC0415 - so that the lack of it is reported at once

        from outbox.console import app as standalone  # noqa: PLC0415 - needed by this command alone
    config = standalone.ConsoleConfig.from_env(
        databases={name: url.render_as_string(hide_password=False) for name, url in databases.urls.items()},
        **read_options(ConsoleServer, server),
    )
    set_up_log(log_format, log_level)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # as is said
        say("Ctrl-C ends it.")
        standalone.serve(config, settings=databases.settings, codecs=declared_by(app).codecs, announce=say)
    say("the console has stopped")


app.callback()(gathered(serve, server=options_of(ConsoleServer)))


@app.command("hash-password")
def hash_password(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The user's name.")] = None,
    role: RoleOption = RoleName.VIEWER,
) -> None:
    """Hash a password for OUTBOX_CONSOLE_USERS; it is asked for, or the first line of stdin.

    With a name, the whole entry NAME:ROLE:HASH is printed, else the hash alone.

    \b
    Examples:
      outbox console hash-password ann --role operator >> users
      printf '%s' "$PASSWORD" | outbox console hash-password
    """
    with needing("outbox console", "console"):
        from outbox.console.auth import hash_password as hashed  # noqa: PLC0415 - needed by this command alone
    _check_name(name)
    entry = hashed(_password())
    print_line(entry if name is None else f"{name}:{role}:{entry}")


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="The user's name; the audit shows it.")],
    role: RoleOption = RoleName.VIEWER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a token for OUTBOX_CONSOLE_TOKENS, to log in with or to send as a bearer token.

    The entry NAME:ROLE:HASH goes to stdout; the token itself is shown this once, on stderr (with -o json both on
    stdout).

    \b
    Example:
      outbox console token nightly-report --role viewer >> tokens
    """
    with needing("outbox console", "console"):
        from outbox.console.auth import hash_token  # noqa: PLC0415 - needed by this command alone
    _check_name(name)
    made = secrets.token_urlsafe(32)
    entry = f"{name}:{role}:{hash_token(made)}"
    if output is Output.JSON:
        print_json({"token": made, "entry": entry})
        return
    print_line(entry)
    say(f"the token, shown this once: {made}")


def _check_name(name: str | None) -> None:
    if name is not None and (not name.strip() or any(char.isspace() or char in ":,=" for char in name)):
        raise Failure(f"NAME {name!r} must have no blanks, commas, colons or equals signs")


def _password() -> str:
    if not sys.stdin.isatty():
        password = sys.stdin.readline().rstrip("\r\n")
    else:
        password = getpass.getpass("Password: ", stream=sys.stderr)
        if getpass.getpass("Again: ", stream=sys.stderr) != password:
            raise Failure("the two passwords differ")
    if not password:
        raise Failure("the password is empty")
    return password
