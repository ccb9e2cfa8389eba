"""``outbox run``: the worker."""

from __future__ import annotations

import enum
import importlib
import logging
import sys
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox.cli.exits import Code, Failure, one_line

if TYPE_CHECKING:
    from outbox.app import Outbox


class LogLevel(enum.StrEnum):
    """How much the worker tells on stderr."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def run(
    app: Annotated[
        str,
        typer.Option(
            "--app",
            envvar="OUTBOX_APP",
            metavar="MODULE:OBJECT",
            help="Where your Outbox is, such as shop.messages:outbox. The module must import your consumers.",
        ),
    ],
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE,…",
            help="Only these of: dispatch, release, check, prune, consume, retry, reconcile, bulk. "
            "Default: all there is work for.",
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="How much to tell on stderr.")] = LogLevel.INFO,
) -> None:
    """Run a worker: dispatch, check, consume, retry, prune, reconcile, carry out what operators order.

    It runs until it is told to stop. Run as many as you like, on as many machines. SIGTERM or Ctrl-C ends it
    in good order: running handlers are waited for (OUTBOX_DRAIN_TIMEOUT, seconds); a second one ends it at once.

    \b
    Examples:
      outbox run --app shop.messages:outbox
      outbox run --app shop.messages:outbox --roles dispatch,release,prune
    """
    _log(log_level)
    outbox = load(app)
    from outbox.worker import Worker  # noqa: PLC0415 - what the other commands needn't import

    names = [role.strip() for role in roles.split(",") if role.strip()] if roles is not None else None
    raise typer.Exit(Worker(outbox, roles=names).run())


def load(path: str) -> Outbox:
    """Import ``module:object``, from the current directory too; return the Outbox.

    Raises:
        Failure: it isn't there, fails to import, or is something else.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise Failure(f"--app {path!r} must be MODULE:OBJECT, such as shop.messages:outbox", Code.CONFIG)
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise Failure(_cannot_import(path, module_name, error), Code.CONFIG) from error
    from outbox.app import Outbox  # noqa: PLC0415

    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            there = sorted(name for name, value in vars(module).items() if isinstance(value, Outbox))
            hint = f"it has {', '.join(f'{module_name}:{name}' for name in there)}" if there else "it has no Outbox"
            raise Failure(f"--app {path!r}: {module_name} has no {attribute!r}; {hint}", Code.CONFIG)
        found = getattr(found, name)
    if not isinstance(found, Outbox):
        raise Failure(f"--app {path!r} is a {type(found).__name__}, not an Outbox", Code.CONFIG)
    return found


def _cannot_import(path: str, module_name: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or "\0"):
        return f"--app {path!r}: there is no module {error.name!r} in {Path.cwd()} or in PYTHONPATH"
    message = f"--app {path!r} can't be imported: {type(error).__name__}: {one_line(str(error))}"
    frames = extract_tb(error.__traceback__)
    return f"{message} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else message


def _log(level: LogLevel) -> None:
    """Log to stderr, unless the application sets up its own logging when it is imported."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
