"""``outbox rocketmq``: serve RocketMQ's own clients, and see which are connected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

import outbox
from outbox.cli.database import DatabaseOptions, DatabasesOptions
from outbox.cli.options import command
from outbox.cli.output import Code, Failure, ListForm, ListFormOption, RowShape, needing, say
from outbox.cli.processes import (
    LogFormatOption,
    LogLevel,
    LogLevelOption,
    be_supervised,
    bound,
    load_all,
    observed,
    set_up_log,
)
from outbox.operator.health.workers import HandlerRow
from outbox.reader import option
from outbox.telemetry.logs import LogFormat

if TYPE_CHECKING:
    from outbox.rocketmq.server import RocketmqServer
    from outbox.worker.supervisor import SupervisedWorker

app: typer.Typer = typer.Typer(
    name="rocketmq",
    help="Serve RocketMQ 5's own clients on the outbox tables, without a broker.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True, slots=True)
class ServeOptions(DatabaseOptions):
    """Which database, and where and how to serve its clients."""

    app: str | None = option(
        None,
        "In place of --url: where your Outbox is, such as shop.messages:outbox.",
        metavar="MODULE:OBJECT",
    )
    bind: tuple[str, ...] = option((), "The database of an Outbox that has none when it is imported.", metavar="URL")
    config: Path | None = option(None, "A TOML file whose table [rocketmq] has topics, groups, users.", metavar="FILE")
    auto_create: bool = option(False, "Make topics by their first use.")
    host: str = option("127.0.0.1", "Where to listen; 0.0.0.0 is every address.", metavar="ADDRESS")
    port: int = option(8081, "The port of plain text; 0 takes a free one.", least=0, most=65535, metavar="N")
    tls_port: int | None = option(None, "One more port, of TLS.", least=0, most=65535, metavar="N")
    cert: str | None = option(None, "The certificate of TLS, in PEM.", metavar="FILE")
    key: str | None = option(None, "Its key.", metavar="FILE")
    http: str | None = option(
        None,
        "Serve /metrics, /healthz and /readyz there; :PORT is every address. Default: no.",
        metavar="HOST:PORT",
    )
    processes: int = option(1, "Processes that share the ports; one that dies is started again.", least=1, most=256)


@dataclass(frozen=True, slots=True)
class ServeChoices:
    """What a process of the server has been told."""

    options: ServeOptions
    log_format: LogFormat | None
    log_level: LogLevel | None


@command(app)
def serve(options: ServeOptions, log_level: LogLevelOption = None, log_format: LogFormatOption = None) -> None:
    """Serve RocketMQ's clients: Java, Go, Python, Node, C#, C++, Rust, PHP, unchanged.

    They send, take part in transactions with check-back, and receive; the tables are those of your services. Beside it
    runs a worker, as ever: `outbox run`. SIGTERM or Ctrl-C ends it in good order, a second one at once.

    Clients use TLS by default in Java, C#, C++ and Go: give --tls-port, or switch it off there. Without users in the
    file of --config every client that reaches the port may send and receive.

    \b
    Examples:
      outbox rocketmq serve --url postgresql+psycopg://me@localhost/shop --auto-create
      outbox rocketmq serve --app shop.messages:outbox --config rocketmq.toml --host 0.0.0.0 --processes 2 --http :9101
      outbox rocketmq serve --tls-port 8082 --cert server.pem --key server.key
    """
    if options.tls_port is not None and (options.cert is None or options.key is None):
        raise Failure("--tls-port needs a certificate: give --cert FILE and --key FILE, both in PEM", Code.CONFIG)
    if options.processes > 1 and 0 in {options.port, options.tls_port}:
        raise Failure("several processes can't share a free port that each would choose: give --port")
    choices = ServeChoices(options, log_format, log_level)
    if options.processes == 1:
        server = _server_of(choices)
        with observed(server, options.http):
            raise typer.Exit(server.run())
    set_up_log(log_format, log_level)
    from outbox.worker.supervisor import Supervisor  # noqa: PLC0415 - needed by this command alone

    code, hindrance = Supervisor(partial(_work, choices), options.processes).run()
    if hindrance is not None:
        say(f"error: {hindrance}")
    raise typer.Exit(code)


def _server_of(choices: ServeChoices) -> RocketmqServer:
    """Import the application, if there is one; return a server for it, which is not started."""
    with needing("outbox rocketmq", "rocketmq"):
        from outbox.rocketmq.options import RocketmqOptions  # noqa: PLC0415 - an extra
        from outbox.rocketmq.server import Listen, RocketmqServer  # noqa: PLC0415 - an extra
    options = choices.options
    if options.app is not None:
        (served, *others) = bound(options.app, load_all(options.app), options.bind)
        if others:
            raise Failure(f"--app {options.app!r} has several Outboxes, and a server takes one", Code.CONFIG)
    else:
        served = outbox.Outbox(options.engine, group="rocketmq", settings=options.settings)
    set_up_log(choices.log_format, choices.log_level)
    offered = RocketmqOptions() if options.config is None else RocketmqOptions.of_file(options.config)
    if options.auto_create:
        offered = replace(offered, auto_create=True)
    listen = [Listen(options.host, options.port)]
    if options.tls_port is not None:
        listen.append(Listen(options.host, options.tls_port, options.cert, options.key))
    return RocketmqServer(served, offered, listen)


def _work(choices: ServeChoices, number: int, link: Connection) -> None:
    """Be one of several processes of the server, until its end."""

    def run(supervised: SupervisedWorker) -> int:
        server = _server_of(choices)
        with observed(server, choices.options.http, number - 1):
            return supervised.run(server)

    be_supervised(link, run)


@dataclass(frozen=True, slots=True)
class ClientRow:
    """A client of a topic, and the servers that it is connected to, by host and process id."""

    columns: ClassVar[str] = "name type language version host group topic connected servers"
    database: str
    topic: str
    group: str | None
    name: str
    servers: list[str]
    type: str | None
    language: str
    version: str
    host: str
    connected: bool

    @classmethod
    def of(cls, row: HandlerRow) -> ClientRow:
        """Return a client of what its servers report; of other releases, what this one knows."""
        options = {name: row.options.get(name) for name in ("type", "language", "version", "host", "connected")}
        return cls(row.database, row.topic, row.group, row.name, row.workers, **options)  # type: ignore[arg-type]


_CLIENTS = RowShape(ClientRow, {"servers": lambda row: ", ".join(row.servers)}, attrgetter("name"))


@command(app, "clients")
def show_clients(databases: DatabasesOptions, form: ListFormOption = ListForm.TABLE) -> None:
    """List the clients of the servers that run, a row for each of their topics.

    \b
    Example:
      outbox rocketmq clients
    """
    databases.show(lambda each: [ClientRow.of(row) for row in each.handlers() if row.kind == "client"], _CLIENTS, form)
