"""What becomes of a reconciliation's result: the report, its files, the exit code; and of one that has none.

How a reconciliation goes on, on stderr: sentences always, bars on a terminal.
"""

from __future__ import annotations

import datetime as dt
import importlib
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from outbox.cli.exits import Code, Failure, as_failure
from outbox.cli.output import Output, console, print_json, say
from outbox.reconcile.job import hidden
from outbox.text import plain

if TYPE_CHECKING:
    from outbox.reconcile.job import Job
    from outbox.reconcile.rows import JobResult

#: How many findings are shown as tables unless somebody says so.
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Report:
    """In which forms a result is wanted; ``limit`` is of the findings shown on stdout."""

    output: Output
    limit: int | None
    html: Path | None
    prometheus: Path | None

    def check(self) -> None:
        """See that the files can be written, before anything else takes its time.

        Raises:
            Failure: names the file and what is in its way.
        """
        for option, path in (("--html", self.html), ("--prometheus", self.prometheus)):
            if path is None:
                continue
            if path.is_dir():
                raise Failure(f"{option} {path} is a folder; name a file", Code.USAGE)
            if not path.parent.is_dir():
                raise Failure(f"{option} {path}: there is no folder {path.parent}", Code.USAGE)
            if not os.access(path.parent, os.W_OK):
                raise Failure(f"{option} {path}: the folder {path.parent} can't be written to", Code.USAGE)
        for name, path in (("html", self.html), ("prometheus", self.prometheus)):
            if path:  # what isn't installed is to be said now
                importlib.import_module(f"outbox.reconcile.report.{name}")

    def tell(self, result: JobResult) -> None:
        """Print the report, and write the files."""
        if self.output is Output.JSON:
            from outbox.reconcile.report import as_json  # noqa: PLC0415

            print_json(as_json(result, self.limit))
        else:
            from outbox.reconcile.report.text import print_report  # noqa: PLC0415

            print_report(result, console(), SHOWN if self.limit is None else self.limit)
        if self.html:
            from outbox.reconcile.report.html import write_html  # noqa: PLC0415

            with _writing(self.html):
                write_html(self.html, result)
        if self.prometheus:
            from outbox.reconcile.report.prometheus import write_prometheus  # noqa: PLC0415

            with _writing(self.prometheus):
                write_prometheus(self.prometheus, result)

    @contextmanager
    def failing(self, job: Job) -> Iterator[None]:
        """Have Prometheus know of a run that fails."""
        try:
            yield
        except BaseException:
            if self.prometheus:
                from outbox.reconcile.report.prometheus import write_failed  # noqa: PLC0415

                with _writing(self.prometheus):
                    write_failed(self.prometheus, job.pairs, dt.datetime.now(dt.UTC))
            raise


def code_of(result: JobResult) -> Code:
    """Return the exit code for a result: what was repaired is no difference any more."""
    from outbox.reconcile.report import verdict  # noqa: PLC0415

    told = verdict(result)
    return Code.FAILED if told.left or told.measures else Code.DONE


@contextmanager
def coming_to_a_result(secrets: Sequence[str]) -> Iterator[None]:
    """Tell a failure from differences, which are 1: whatever fails has another code. ``secrets``: URLs.

    Raises:
        Failure: whatever it was.
    """
    try:
        yield
    except Exception as error:
        failure = as_failure(error)
        if failure is None:
            text = traceback.format_exc()
            for url in secrets:
                text = hidden(text, url)
            say(text)
            failure = Failure("this was not foreseen, see above", Code.NO_RESULT)
        code = Code.NO_RESULT if failure.code is Code.FAILED else failure.code
        raise Failure(str(failure), code) from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(f"{path} can't be written: {error.strerror or error}") from error


class Bars:
    """Somebody who is told (`outbox.reconcile.engine.Progress`), and shows it; the bars are gone in the end."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._progress.stop()

    def stage(self, title: str, total: int | None) -> None:
        """Show a stage in place of the one before."""
        self._end()
        self._task = self._progress.add_task(plain(title), total=total)

    def done(self, steps: int) -> None:
        """Show how much of the stage is done."""
        if self._task is not None:
            self._progress.update(self._task, completed=steps)

    def say(self, sentence: str) -> None:
        """Show a sentence above the bar."""
        self._console.print(plain(sentence))

    def _end(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
