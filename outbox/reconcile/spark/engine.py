"""The engine that runs the tasks of a comparison on Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import pyarrow as pa

from outbox.errors import OutboxError
from outbox.reconcile.archive import UnionSide
from outbox.reconcile.compare import Comparison, Side, Task
from outbox.reconcile.job import Spark
from outbox.reconcile.source import PostgresSide
from outbox.reconcile.spark.java import told
from outbox.reconcile.spark.jdbc import planned_by_jdbc, reads_by_jdbc
from outbox.reconcile.spark.place import refuse_loopback
from outbox.reconcile.spark.running import run
from outbox.reconcile.spark.session import Session, session
from outbox.reconcile.spark.tasks import planned, results

# Each partition costs a fifth of a second in this process, which has few cores; so many for each of them even out
# what one has to do more than another. On a cluster each task is one: how many cores it will have nobody knows yet.
_OF_CORE = 4
# What JDBC reads is asked for its columns first, partition by partition, by the driver.
_BY_JDBC = 64


class SparkEngine:
    """Runs tasks on Spark, which starts when there is something to run, and is kept until `close`.

    ``workers`` tasks run at once where Spark is started in this process; elsewhere as many as the application has
    cores.
    """

    def __init__(self, options: Spark, workers: int) -> None:
        self._options = options
        self._workers = workers
        self._stack = ExitStack()
        self._session: Session | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session, if it is one of ours."""
        self._session = None
        self._stack.close()

    @property
    def session(self) -> Session:
        """The session; it is opened if it wasn't.

        Raises:
            InvalidSettings: the options contradict each other, or a session that is there already.
            ReconcileError: Spark doesn't start.
        """
        if self._session is None:
            self._session = self._stack.enter_context(session(self._options, self._workers))
        return self._session

    def run(self, comparison: Comparison, tasks: Sequence[Task], done: Callable[[int], None]) -> Iterator[pa.Table]:
        """Yield the result of all tasks.

        Raises:
            InvalidSettings: executors elsewhere would look for a database on their own host.
            SourceError: a side can't be read.
            ReconcileError: Spark doesn't start, or fails.
        """
        if not tasks:
            return
        opened = self.session
        for side in (comparison.producer, comparison.consumer):
            for url in _databases(side):
                refuse_loopback(opened.place, url)
        yield self._collected(opened, comparison, tasks, lambda share: done(int(share * len(tasks))))
        done(len(tasks))

    def _collected(
        self, opened: Session, comparison: Comparison, tasks: Sequence[Task], share: Callable[[float], None]
    ) -> pa.Table:
        by_jdbc = self._options.jdbc_jar is not None and reads_by_jdbc(comparison)
        plan = planned_by_jdbc if by_jdbc else planned
        most = _BY_JDBC if by_jdbc else _OF_CORE * opened.cores if opened.place.in_process else len(tasks)
        partitions = min(len(tasks), most)
        try:
            answers = run(opened, plan(opened.spark, comparison, tasks, partitions), share)
        except OutboxError:
            raise
        except Exception as error:  # what Spark raises has no common base
            raise told(error) from None
        return results(answers)


def _databases(side: Side) -> list[str]:
    match side:
        case PostgresSide(access=access):
            return [access.url]
        case UnionSide(live=live):
            return _databases(live)
        case _:
            return []
