"""``outbox demo``: the bank transfer."""

from __future__ import annotations

import importlib
import sys
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import typer

import outbox
from outbox.cli.exits import Code, Failure
from outbox.cli.output import Output, OutputOption
from outbox.errors import pip_install
from outbox.reconcile.job import EngineName


def demo(  # noqa: PLR0917 - options of the command line
    orders: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Payment orders, PKDD'99 format. Default: generated ones.")
    ] = None,
    accounts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The account ids that bank A knows. Default: all senders.")
    ] = None,
    opening_balance: Annotated[
        str | None,
        typer.Option(metavar="AMOUNT", help="What each account of bank A begins with. Default: what its orders need."),
    ] = None,
    transfers: Annotated[int, typer.Option(metavar="N", help="How many orders to generate.")] = 1000,
    producers: Annotated[int, typer.Option(metavar="N", help="Processes of bank A.")] = 2,
    consumers: Annotated[int, typer.Option(metavar="N", help="Processes of bank B.")] = 2,
    crash: Annotated[
        bool, typer.Option("--crash", help="Kill processes at random moments, and start them again.")
    ] = False,
    kills: Annotated[
        int | None, typer.Option(metavar="N", help="How many to kill; implies --crash. Default: 30.")
    ] = None,
    two_phase: Annotated[
        bool, typer.Option("--two-phase", help="Prepare a half message before each debit; a fence decides the orphans.")
    ] = False,
    tcc: Annotated[
        bool, typer.Option("--tcc", help="Reserve, then confirm or cancel; a checker decides the orphans.")
    ] = False,
    faults: Annotated[
        bool, typer.Option("--faults", help="Damage the tables of both banks after the work; all is found and mended.")
    ] = False,
    reconcile: Annotated[
        bool, typer.Option("--reconcile/--no-reconcile", help="Compare the tables of the banks at the end.")
    ] = True,
    engine: Annotated[
        EngineName, typer.Option(help="What compares them; auto: Spark if it is installed.")
    ] = EngineName.AUTO,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the reconciliation's HTML page.")] = None,
    console: Annotated[
        bool, typer.Option("--console", help="Keep the banks open after the work, with the admin console over both.")
    ] = False,
    console_port: Annotated[int, typer.Option(metavar="PORT", help="Where the console listens.")] = 8900,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the generated orders, the kills and the faults.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if an order was refused.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Transfer money between two banks, reconcile them, audit every cent.

    Each bank has a database. They run on a PostgreSQL of their own that is gone afterwards, or on the server in
    OUTBOX_DATABASE_URL. The exit code is 1 if anything is missing, doubled, or undecided. Needs the extra "demo"; with
    "demo-spark" installed, the reconciliation runs on Spark.

    At the end the message tables and ledgers of the two banks are reconciled. With --faults they are damaged before:
    the report says what was found, what was repaired, and what a human had to mend.

    With --console the banks stay open when the work is done, until Ctrl-C: bank B has closed some accounts, so that
    there are parked transfers to be found in the admin console, and to be refunded or retried.

    With --two-phase or --tcc, kills and stalls are aimed at the moments between a half message and its decision. The
    report says how each orphan was decided.

    \b
    Examples:
      outbox demo
      outbox demo --transfers 5000 --crash
      outbox demo --crash --faults --report report.html
      outbox demo --console
      outbox demo --two-phase --crash
      outbox demo --tcc --crash --orders orders.csv
    """
    module = _load()
    try:
        options = module.DemoOptions(
            orders=orders,
            accounts=accounts,
            opening_balance=None if opening_balance is None else Decimal(opening_balance),
            transfers=transfers,
            producers=producers,
            consumers=consumers,
            crash=crash,
            kills=kills,
            two_phase=two_phase,
            tcc=tcc,
            faults=faults,
            reconcile=reconcile,
            engine=engine,
            report=report,
            console=console,
            console_port=console_port,
            seed=seed,
            strict=strict,
            json=output is Output.JSON,
        )
    except InvalidOperation:
        raise Failure(f"--opening-balance {opening_balance!r} is not an amount", Code.USAGE) from None
    except ValueError as error:
        raise Failure(str(error), Code.USAGE) from None
    raise typer.Exit(module.run(options))


def _load() -> Any:
    """Import the example: from inside the installed package, or from beside it in a checkout."""
    package = Path(outbox.__file__).resolve().parent
    inside = (package / "examples" / "bank_transfer").is_dir()
    if not inside:
        sys.path.insert(0, str(package.parent))
    try:
        return importlib.import_module(
            "outbox.examples.bank_transfer.demo" if inside else "examples.bank_transfer.demo"
        )
    except ImportError as error:
        raise Failure(f"the demo can't be loaded: {error}; {pip_install('demo')}", Code.CONFIG) from error
