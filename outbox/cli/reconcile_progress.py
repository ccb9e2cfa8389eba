"""How a reconciliation goes on, on stderr: sentences always, bars on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from outbox.text import plain


class Bars:
    """Somebody who is told (`outbox.reconcile.told.Told`), and shows it; the bars are gone in the end."""

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
