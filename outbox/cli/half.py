"""``outbox half``: find undecided half messages, see how they were checked, and do something about them."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Annotated

import typer

from outbox.cli import half_acts
from outbox.cli.arguments import (
    ActorOption,
    AfterOption,
    BodyOption,
    LimitOption,
    YesOption,
    as_id,
    as_seconds,
    make_sure,
)
from outbox.cli.database import SchemaOption, UrlOption, find_settings, find_url, producer_opened, where
from outbox.cli.exits import Code, Failure
from outbox.cli.half_acts import ReasonOption
from outbox.cli.output import Output, OutputOption, age, print_json, print_table, readable, say, table
from outbox.cli.way import story_of_half
from outbox.message.model import Resolution

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import URL

    from outbox.operator.old_halves import HalfPage, HalfView
    from outbox.settings import Settings

app = typer.Typer(
    help="Find undecided half messages, see how they were checked, have them checked again, or decide them.\n\n"
    "What is done to one is recorded in the audit table, with who did it and why.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_COUNTED = 10_000


class Wanted(enum.StrEnum):
    """Which undecided halves to list."""

    ALL = "all"
    IMMUNE = "immune"
    ORPHAN = "orphan"
    WAITING = "waiting"
    PARKED = "parked"


HalfArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the half message.")]
_VERB = {Resolution.COMMIT: "Commit", Resolution.ROLLBACK: "Roll back"}


@app.command("list")
def show_list(
    url: UrlOption = None,
    schema: SchemaOption = None,
    status: Annotated[Wanted, typer.Option(help="Only halves that stand so.")] = Wanted.ALL,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    older_than: Annotated[str | None, typer.Option(metavar="TIME", help="Not younger: 90s, 15m, 2h, 3d.")] = None,
    limit: LimitOption = 50,
    after: AfterOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List undecided half messages, the oldest first.

    A search looks at 100000 of them at a time and says where to go on.

    \b
    Statuses:
      immune   young: left alone until its first check
      orphan   its check is due; if it stays so, no worker is running, or none that has a checker for its topic
      waiting  an orphan that was asked about without a verdict; it is asked about again at its next check
      parked   asked about as often as may be: waits for a human
    \b
    Examples:
      outbox half list --status parked
      outbox half list --topic payments --older-than 1h -o json
    """
    from outbox.operator.old_halves import HalfFilter, list_halves  # noqa: PLC0415

    address, settings = find_url(url), find_settings(schema)
    seconds = as_seconds(older_than) if older_than else None
    if older_than and seconds is None:
        raise Failure(f"--older-than {older_than!r} must be a duration: 90s, 15m, 2h, 3d", Code.USAGE)
    wanted = HalfFilter(topic, None if status is Wanted.ALL else status.value, seconds)
    last = as_id(after, "--after") if after else None
    with producer_opened(address, settings) as connection:
        page = list_halves(connection, settings, wanted, after=last, limit=limit)
    _print_page(page, output)


@app.command()
def show(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the half message.")],
    url: UrlOption = None,
    schema: SchemaOption = None,
    body: BodyOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one half message, decided or not, each of its checks, and what operators did.

    A check has the answer of the checker or the fence: commit, rollback, or unknown with its error. In its place there
    may be "(being asked)", or "(no answer)": the worker that asked died over it, or was cut off.

    \b
    Example:
      outbox half show 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --body
    """
    from outbox.operator.old_halves import show_half  # noqa: PLC0415

    half_id, address, settings = as_id(id_), find_url(url), find_settings(schema)
    with producer_opened(address, settings) as connection:
        view = show_half(connection, settings, half_id, body=body)
    if not view.known:
        raise Failure(f"no half message {half_id} in {where(address, settings.schema)}", Code.NOT_FOUND)
    shown = readable(view.half, view.raw) if body else None
    if output is Output.JSON:
        fields = {f.name: getattr(view, f.name) for f in dataclasses.fields(view) if f.name != "raw"}
        print_json(fields | ({"body": shown} if body else {}))
        return
    print_table(*story_of_half(view, shown))


@app.command()
def check(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the half message.")],
    reason: ReasonOption,
    actor: ActorOption = None,
    app_: Annotated[
        str | None,
        typer.Option(
            "--app",
            envvar="OUTBOX_APP",
            metavar="MODULE:OBJECT",
            help="Where your Outbox is, such as shop.messages:outbox: its checker is asked here and now.",
        ),
    ] = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have an undecided half message checked.

    A fence is tried at once. Else the next pass of a worker asks the checker, about a parked half exactly once more.
    With --app (or OUTBOX_APP) the checker is asked in this process, in the application's own database, and the answer
    is printed; a parked half stays parked if there is no verdict.

    \b
    Examples:
      outbox half check 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "the provider is back"
      outbox half check 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "see what it says" --app shop.messages:outbox
    """
    half_id, act = as_id(id_), half_acts.Act.of(actor, reason)
    if app_ is None:
        address, settings = find_url(url), find_settings(schema)
        with producer_opened(address, settings) as connection:
            answer = half_acts.check(connection, settings, half_id, act)
    elif url or schema:
        raise Failure("--app has a database and a schema of its own: leave out --url and --schema", Code.USAGE)
    else:
        answer = half_acts.check_by_app(app_, half_id, act)
    half_acts.print_answer(half_id, answer, output)


@app.command()
def reset(  # noqa: PLR0917 - options of the command line
    reason: ReasonOption,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID…", help="The ids of half messages.")] = None,
    parked: Annotated[bool, typer.Option("--parked", help="All that are parked, instead of ids.")] = False,
    topic: Annotated[str | None, typer.Option(help="With --parked: only this topic.")] = None,
    actor: ActorOption = None,
    yes: YesOption = False,
    url: UrlOption = None,
    schema: SchemaOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set the counter of undecided half messages back, so that they are checked again from the start.

    The next pass of a worker asks, and goes on as with a new orphan. Each half is reset by itself, whatever becomes of
    the others.

    \b
    Examples:
      outbox half reset 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "the checker is mended"
      outbox half reset --parked --topic payments --reason "the provider is back"
    """
    act, half_ids = half_acts.Act.of(actor, reason), [as_id(text) for text in dict.fromkeys(ids or ())]
    if bool(half_ids) == parked or (topic and not parked):
        raise Failure("give ids, or --parked, which --topic may narrow down", Code.USAGE)
    address, settings = find_url(url), find_settings(schema)
    with producer_opened(address, settings) as connection:
        if half_ids:
            outcome = half_acts.reset(connection, settings, half_ids, act)
        else:
            from outbox.operator.old_halves import count_parked  # noqa: PLC0415

            count = count_parked(connection, settings, topic, _COUNTED)
            what = f"{half_acts.counted(count, at_least=count == _COUNTED)} parked in {topic or 'all topics'}"
            make_sure(f"Have {what} checked again from the start?", f"not resetting {what}", yes=yes or not count)
            outcome = half_acts.reset_parked(connection, settings, topic, act)
    half_acts.print_outcome(outcome, output)


@app.command()
def commit(
    id_: HalfArgument,
    reason: ReasonOption,
    actor: ActorOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Commit a fenced half, though its business change was never committed.")
    ] = False,
    yes: YesOption = False,
    url: UrlOption = None,
    schema: SchemaOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Commit an undecided half message by hand, for ever: its message goes out.

    The first decision wins: one that its producer or a check made before stays, and the exit code is 4 if it was a
    rollback.

    \b
    Example:
      outbox half commit 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "the provider confirmed it by phone"
    """
    act = half_acts.Act.of(actor, reason)
    _decide(as_id(id_), Resolution.COMMIT, act, find_url(url), find_settings(schema), output, yes=yes, force=force)


@app.command()
def rollback(
    id_: HalfArgument,
    reason: ReasonOption,
    actor: ActorOption = None,
    yes: YesOption = False,
    url: UrlOption = None,
    schema: SchemaOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Roll an undecided half message back by hand, for ever: no consumer will ever see it.

    The first decision wins: one that its producer or a check made before stays, and the exit code is 4 if it was a
    commit. A function that still runs fails at its commit.

    \b
    Example:
      outbox half rollback 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "the order was cancelled by phone"
    """
    act = half_acts.Act.of(actor, reason)
    _decide(as_id(id_), Resolution.ROLLBACK, act, find_url(url), find_settings(schema), output, yes=yes)


def _decide(
    half_id: UUID,
    resolution: Resolution,
    act: half_acts.Act,
    address: URL,
    settings: Settings,
    output: Output,
    *,
    yes: bool,
    force: bool = False,
) -> None:
    from outbox.operator.old_halves import show_half  # noqa: PLC0415

    with producer_opened(address, settings) as connection:
        if not yes:
            _ask(show_half(connection, settings, half_id), resolution)
        decision = half_acts.resolve(connection, settings, half_id, resolution, act, force=force)
    half_acts.print_decision(decision, output)


def _ask(view: HalfView, resolution: Resolution) -> None:
    """Ask whether to decide a half; not if that is done, or there is none, which the act will tell."""
    if view.half is None or view.op is not None:
        return
    key = "" if view.half["key"] is None else f", key {view.half['key']!r}"
    consequence = "its message goes out" if resolution is Resolution.COMMIT else "no consumer will ever see it"
    make_sure(
        f"{_VERB[resolution]} half message {view.id} of topic {view.half['topic']!r}{key} ({view.status})? "
        f"Then {consequence}, and nothing can undo that.",
        f"not deciding half message {view.id}",
        yes=False,
    )


def _print_page(page: HalfPage, output: Output) -> None:
    if output is Output.JSON:
        print_json({"halves": [dataclasses.asdict(row) for row in page.halves], "next": page.next})
        return
    rows = [
        (
            row.id,
            row.topic,
            row.key,
            row.status,
            age(row.age),
            row.fenced,
            row.checks,
            "(being asked)" if row.being_asked else row.last_answer,
            row.last_error,
            "" if row.parked_at else f"in {age(row.next_check_in)}" if row.next_check_in > 0 else "due",
            row.parked_at,
            row.reason,
        )
        for row in page.halves
    ]
    print_table(
        table(
            (
                "id", "topic", "key", "status", "age>", "fenced", "checks>", "last answer", "last error", "next check",
                "parked at", "reason",
            ),
            rows,
        )
    )  # fmt: skip
    if page.exhausted:
        say(f"looked at 100000 half messages; to search further: --after {page.next}")
    elif page.next:
        say(f"there may be more: --after {page.next}")
