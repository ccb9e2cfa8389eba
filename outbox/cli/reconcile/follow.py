"""``outbox reconcile follow``: a reconciliation without an end, in the foreground."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from sqlalchemy.exc import SQLAlchemyError

from outbox.cli import options, output
from outbox.cli.exits import Code, needing
from outbox.cli.options import command, options_of, read_options
from outbox.cli.output import Output
from outbox.cli.reconcile import (
    FILTERS,
    PairOptions,
    RecordingOptions,
    SourceOptions,
    described_job,
    no_result,
)
from outbox.database.engines import connect, discard
from outbox.database.execute import Backoff
from outbox.errors import SourceError, was_interrupted
from outbox.reconcile.job import PASS_EVERY, Job, Window, hidden
from outbox.text import summary_of

if TYPE_CHECKING:
    from outbox.reconcile.follow.follower import Follower, PassResult

app: typer.Typer = typer.Typer(rich_markup_mode=None)

#: What only a run has is left out.
_WINDOW = options_of(Window, "last", "until")
_JOB = options_of(
    Job,
    *("producer", "consumer", "pairs", "window", "measures", "record", "record_in", "spark"),
    *("tier", "engine", "keep_for", "max_time", "max_findings", "workers"),
)
#: How long (seconds) until a pass that failed is tried again.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0


@command(app, "follow", filters=FILTERS, window=_WINDOW, job=_JOB)
def follow(
    *,
    source: SourceOptions,
    pairs: PairOptions,
    filters: Any,
    window: Any,
    job: Any,
    recording: RecordingOptions,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What it is called in the record.")] = "follow",
    every: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Between two passes.")] = PASS_EVERY,
    form: Annotated[Output, typer.Option("--output", "-o", help="json: an event a line.")] = Output.TABLE,
    yes: options.YesOption = False,
) -> None:
    """Follow the log until Ctrl-C: tell what differs when it is past its grace period, and when it is gone.

    It begins with what is sent from now on, or at --since, and goes on where it was when it is started again. A worker
    does the same with `outbox.reconciliation("live", follows=True)`. The exit code is 6 if differences are left.

    \b
    Examples:
      outbox reconcile follow --topic orders --group mail --grace 30s
      outbox reconcile follow --app shop.messages:outbox --apply --yes -o json
    """
    secrets: list[str] = []
    with no_result(secrets), needing("outbox reconcile follow", "reconcile"):
        from outbox.reconcile.follow.follower import Follower  # noqa: PLC0415 - an extra

        work = described_job(source, pairs, filters, window, {**read_options(Job, job), **recording.values(source)})
        secrets += [work.producer.url, work.consumer.url, work.recorder.url]
        if work.apply:
            options.need_terminal("not repairing", yes=yes)
        shown = _Shown(name, form)
        followers = [Follower(work, pair, name, every, shown.report) for pair in work.pairs]
        with _until_stopped():
            _run(work, followers)
    raise typer.Exit(Code.PROBLEMS if any(shown.open.values()) else Code.DONE)


def _run(job: Job, followers: list[Follower]) -> None:
    """Take the passes as they come due; say what goes wrong, and go on."""
    from outbox.reconcile.source import engine_of  # noqa: PLC0415 - an extra

    backoff, engine = Backoff(_FIRST_WAIT, _LONGEST_WAIT), engine_of(job.recorder)
    with ExitStack() as stack:
        for follower in followers:
            stack.callback(follower.close)
        connection = None
        while True:
            try:
                connection = connection or connect(engine)
                passes = [follower(connection) for follower in followers]
                backoff.reset()
                wait = 0.0 if any(each.more for each in passes) else 1.0
            except (SourceError, SQLAlchemyError) as error:
                if was_interrupted(error):
                    raise KeyboardInterrupt from None
                text = " ".join(summary_of(error).split())
                for access in (job.producer, job.consumer, job.recorder):
                    text = hidden(text, access.url)
                output.say(f"{text}; it is tried again")
                if connection is not None:
                    discard(connection)
                connection, wait = None, backoff.next()
            time.sleep(wait)


@dataclasses.dataclass
class _Shown:
    """Shows what passes have to tell, and knows how many differences are left of each pair."""

    name: str
    form: Output
    open: dict[str, int] = dataclasses.field(default_factory=dict)

    def report(self, result: PassResult) -> None:
        """Show what a pass has to tell."""
        from outbox.reconcile.follow.follower import events_of  # noqa: PLC0415 - an extra

        self.open[str(result.pair)] = result.open.total()
        for event in events_of(result, f"reconcile {self.name}: {result.pair}", self.name):
            facts = event.facts()
            if self.form is Output.JSON:
                typer.echo(json.dumps({"event": event.code, **facts}))
            else:
                typer.echo(event.text % facts)


@contextmanager
def _until_stopped() -> Iterator[None]:
    """Go on after the block once Ctrl-C or SIGTERM has ended it."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        output.say("stopped; when it is started again it goes on from here")
    finally:
        signal.signal(signal.SIGTERM, before)
