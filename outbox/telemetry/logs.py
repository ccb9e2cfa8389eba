"""How ``outbox run`` writes its log: for people, or one JSON object a line for what collects logs."""

from __future__ import annotations

import datetime as dt
import enum
import json
import logging
import multiprocessing
import sys


class LogFormat(enum.StrEnum):
    """The forms of a log record."""

    TEXT = enum.auto()
    JSON = enum.auto()


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: In one of several processes: which one it is.
_TEXT_OF_SEVERAL = "%(asctime)s %(levelname)s %(processName)s %(name)s: %(message)s"
#: What every record has, and is not among the facts of an event.
_OF_RECORDS = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON, in ASCII: whatever is in a message can't begin a line of its own.

    It has ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``process_name`` in one of several processes, ``message``,
    all that came with ``extra``, and ``traceback`` where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {name: value for name, value in vars(record).items() if name not in _OF_RECORDS}
        line = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **({"process_name": record.processName} if multiprocessing.parent_process() else {}),
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


def configure(log_format: LogFormat | None, level: str | None) -> None:
    """Set up the log of this process, after the application was imported, which may have set up its own.

    Its own is left as it is, unless a format is asked for: then that takes the place of what the root logger had.
    Without either, records of INFO and above go to stderr as text. ``level`` is that of the root logger, or, beside
    the application's own set-up, that of the logger ``outbox``.
    """
    root, ours = logging.getLogger(), logging.getLogger("outbox")
    if log_format is None and root.handlers:
        if level is not None:
            ours.setLevel(level)
    else:
        handler = logging.StreamHandler(sys.stderr)
        text = _TEXT_OF_SEVERAL if multiprocessing.parent_process() else _TEXT
        handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else logging.Formatter(text))
        logging.basicConfig(level=level or "INFO", handlers=[handler], force=True)
    # It says with each look at a database which dialect that has.
    alembic = logging.getLogger("alembic")
    if alembic.level == logging.NOTSET:
        alembic.setLevel(logging.WARNING)
