"""The producing processes: each that sends writes about once a minute that it does, behind the COMMIT of a send.

Through psycopg 3 and SQLAlchemy the statement goes with the COMMIT, as a transaction of its own after it: it costs no
thread, and no round trip where the transaction did anything besides. Through any other driver, and from a driver's own
connection, it goes by a connection of its own, in a thread that ends with it, so that no sender waits. Either way it
holds no lock of the business transaction's, and when it fails nothing else does. A process that sends nothing isn't
seen.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.engines import usable_anywhere
from outbox.database.execute import Statement, Template, execute
from outbox.message.model import uuid7
from outbox.telemetry.events import AfterCommitFailed
from outbox.telemetry.hooks import emit
from outbox.text import process_name, summary_of

if TYPE_CHECKING:
    from sqlalchemy import Engine

#: What the thread of a report is called.
THREAD = "outbox-producer-report"

#: Seconds between two reports of a process, and from its start to the first: a process that ends sooner isn't seen.
REPORT_EVERY = 60.0

# What the report says is worth no wait for the disk.
_REPORT = Template("""
WITH at_once AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
INSERT INTO {s}.producer_process AS p (id, name, producer_group, version, started_at)
SELECT %(id)s, %(name)s, %(group)s, %(version)s, clock_timestamp() - make_interval(secs => %(age)s) FROM at_once
ON CONFLICT (id) DO UPDATE SET seen_at = clock_timestamp()
""")


class ProcessReport:
    """What this process reports as a producer of a group; ``due_at`` is when next, by `time.monotonic`."""

    def __init__(self, schema: str, group: str) -> None:
        self._schema = schema
        self._group = group
        self._began = time.monotonic()
        self._process: tuple[int, UUID] | None = None
        self.due_at: float = self._began + REPORT_EVERY

    def write_apart(self, engine: Engine) -> None:
        """Write the report, if it is due, by a connection of ``engine``'s database that no transaction uses.

        Returns at once. It may come to nothing, and nothing tells the caller.
        """
        if self.due_at > time.monotonic():
            return
        thread = threading.Thread(target=_write, args=(engine, self.statement()), name=THREAD, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many threads, or the process ends
            emit(AfterCommitFailed(reason=str(error), error=error))

    def statement(self) -> Statement:
        """Return the report; the next one is due a while later."""
        from outbox import __version__  # noqa: PLC0415 - the package itself

        self.due_at = time.monotonic() + REPORT_EVERY
        pid = os.getpid()
        # A forked process is another one.
        if self._process is None or self._process[0] != pid:
            self._process = pid, uuid7()
        facts = {"id": self._process[1], "name": process_name(), "group": self._group, "version": __version__}
        return _REPORT(self._schema, **facts, age=time.monotonic() - self._began)


def _write(engine: Engine, report: Statement) -> None:
    try:
        with usable_anywhere(engine).connect() as connection, connection.begin():
            execute(connection, report)
    except Exception as error:
        emit(AfterCommitFailed(reason=summary_of(error), error=error))
