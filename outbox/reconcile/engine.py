"""What runs the tasks of a comparison, and the engine that does it in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Protocol

import pyarrow as pa

from outbox.reconcile.compare import Comparison, Task


class Engine(Protocol):
    """Runs tasks, in any order, some at the same time; each exactly once as far as its result is concerned."""

    def run(self, comparison: Comparison, tasks: Sequence[Task], done: Callable[[int], None]) -> Iterator[pa.Table]:
        """Yield results (`compare.RESULT`) of one or several tasks each.

        ``done`` is told how many of the tasks are finished.

        Raises:
            SourceError: a side can't be read.
        """
        ...


class LocalEngine:
    """Threads of this process: reading and comparing release Python's lock."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def run(self, comparison: Comparison, tasks: Sequence[Task], done: Callable[[int], None]) -> Iterator[pa.Table]:
        """Yield the result of each task as it is finished."""
        with ThreadPoolExecutor(self._workers, thread_name_prefix="reconcile") as pool:
            futures = [pool.submit(comparison, task) for task in tasks]
            try:
                for finished, future in enumerate(as_completed(futures), 1):
                    yield future.result()
                    done(finished)
            finally:
                for future in futures:
                    future.cancel()
