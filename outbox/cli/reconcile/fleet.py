"""``outbox reconcile fleet``: many services' databases compared as one, by the patterns of a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox.cli import options, output
from outbox.cli.exits import Code, needing
from outbox.cli.options import command, options_of, read_options
from outbox.cli.output import Output
from outbox.cli.reconcile import SHOWN, SummaryOptions, no_result, writing
from outbox.reconcile.fleet.config import Bounds, Fleet, read_fleet
from outbox.reconcile.job import Repair

if TYPE_CHECKING:
    from outbox.reconcile.fleet.members import Member
    from outbox.reconcile.fleet.run import FleetResult

app: typer.Typer = typer.Typer(rich_markup_mode=None)

#: They go over those of the file.
_BOUNDS = options_of(Bounds)


@command(app, "fleet", bounds=_BOUNDS)
def fleet(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The fleet as a file, or a folder of files *.toml.")],
    bounds: Any,
    report: SummaryOptions,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only databases named so, and no totals; again for more."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Trust no range: verify all anew.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Repair what differs, by the policy.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be compared; compare nothing.")] = False,
    yes: options.YesOption = False,
) -> None:
    """Compare many services' databases as one: what is compared is found by the patterns of a file.

    Databases are compared some at a time, and with a bounded number of sessions on each server. One that fails doesn't
    end the others. The exit code is 0 in sync (or all repaired), 6 if differences are left, 5 if some came to no
    result, 70 if none did.

    \b
    Examples:
      outbox reconcile fleet fleet.toml --dry-run
      outbox reconcile fleet fleet.toml --prometheus /var/lib/node_exporter/fleet.prom
      outbox reconcile fleet fleet.d --only 'shop-*' --apply --yes
    """
    secrets: list[str] = []
    with no_result(secrets), needing("outbox reconcile fleet", "reconcile"):
        report.check()
        whole = read_fleet(path)
        secrets += [access.url for access in whole.databases.values()]
        job = {**whole.job, **({"keep_for": 0.0} if fresh else {}), **({"apply": True} if apply else {})}
        limits = dataclasses.replace(whole.bounds, **read_options(Bounds, bounds))
        whole = dataclasses.replace(whole, job=job, bounds=limits, only=tuple(only or ()))
        if dry_run:
            _show(whole, report.output)
            return
        if whole.job.get("apply"):
            options.need_terminal("not repairing", yes=yes)
        result = _run(whole, yes=yes)
        _report(report, result)

    reached = result.verdict
    if result.failed:
        raise typer.Exit(Code.PARTIAL if result.results else Code.NO_RESULT)
    raise typer.Exit(Code.PROBLEMS if reached.left or reached.measures else Code.DONE)


def _show(fleet: Fleet, form: Output) -> None:
    from outbox.reconcile.fleet.members import members_of  # noqa: PLC0415 - an extra

    with output.Bars() as bars:
        found = members_of(fleet, bars)
    rows = [_row(member) for member in found.members]
    table = output.rows_table("producer consumer priority> sessions pairs", rows)
    output.print_as(form, {"members": rows, "unreachable": found.unreachable}, table)
    for name, why in found.unreachable.items():
        output.say(f"{name}: {why}")


def _row(member: Member) -> dict[str, Any]:
    return {
        "producer": member.producer,
        "consumer": member.consumer,
        "priority": member.priority,
        "sessions": ", ".join(f"{server}: {number}" for server, number in member.sessions.items()),
        "pairs": ", ".join(map(str, member.job.pairs)),
    }


def _run(fleet: Fleet, *, yes: bool) -> FleetResult:
    from outbox.reconcile.fleet.run import compare_fleet, mend_fleet  # noqa: PLC0415 - an extra

    with output.Bars() as bars:
        result = compare_fleet(fleet, bars)
    if fleet.job.get("apply"):
        number = sum(
            found
            for member, each in result.results
            for pair in each.pairs
            for kind, found in pair.differences.items()
            if kind.repair(member.job.policy) is not Repair.ALERT
        )
        if number and (yes or options.ask(f"Repair {number:,} differences?")):
            with output.Bars() as bars:
                mend_fleet(fleet, result, bars)
    return result


def _report(report: SummaryOptions, result: FleetResult) -> None:
    from outbox.reconcile.fleet.report import (  # noqa: PLC0415 - an extra
        fleet_as_json,
        print_fleet,
        write_fleet_html,
        write_fleet_prometheus,
    )
    from outbox.reconcile.report.findings import write_findings  # noqa: PLC0415 - an extra

    if report.output is Output.JSON:
        output.print_json(fleet_as_json(result, report.limit))
    else:
        print_fleet(result, output.console(), SHOWN if report.limit is None else report.limit)
    for name, path in report.files():
        with writing(path):
            if name == "html":
                write_fleet_html(path, result)
            elif name == "prometheus":
                write_fleet_prometheus(path, result)
            else:
                for _, each in result.results:
                    write_findings(path, each)
