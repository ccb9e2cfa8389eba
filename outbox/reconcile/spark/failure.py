"""What Spark raises, in one line: a hundred lines of Java trace hide the one that says what happened."""

from __future__ import annotations

import re

from outbox.errors import ReconcileError, SourceError

_PYTHON = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Interrupt|Exit|Warning))(?:: (.*))?$", re.MULTILINE)
_DRIVER = re.compile(r"org\.postgresql\.util\.PSQLException: (.+)")
# "Caused by: x.y.Error: what", and what Py4J puts before the first trace: ": x.y.Error: what".
_CAUSE = re.compile(r"^(?:Caused by)?: (?:[\w.$]+: )?(.+)$", re.MULTILINE)


def told(error: Exception) -> ReconcileError:
    """Return what to raise instead; the Python trace of a task, if there is one, is its note."""
    text = _said(error)
    if found := _DRIVER.search(text):
        return SourceError(f"can't be read through JDBC: {found[1].strip()}")
    if "ClassNotFoundException" in text and "org.postgresql.Driver" in text:
        return ReconcileError(
            "this Spark session has no PostgreSQL driver; mend: give its jar to spark-submit with --jars, or leave out "
            "the driver jar here"
        )
    if (start := text.rfind("Traceback (most recent call last)")) >= 0:
        return _of_task(text[start:])
    return ReconcileError(f"Spark failed: {cause(error)}")


def cause(error: Exception) -> str:
    """Return what happened in the first place, in one line."""
    text = _said(error)
    lines = [*_CAUSE.findall(text)[::-1], *text.splitlines()]
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)


def _said(error: Exception) -> str:
    # PySpark keeps Java's trace, with what was the cause, apart from what it shows.
    return f"{error}\n{getattr(error, '_stackTrace', None) or ''}"


def _of_task(trace: str) -> ReconcileError:
    trace = trace.partition("\n\tat ")[0]
    raised = list(_PYTHON.finditer(trace))
    if not raised:
        return ReconcileError("a task failed on Spark")
    last = raised[-1]
    if last[1] == "ModuleNotFoundError":
        return ReconcileError(
            f"Spark's executors miss a library ({last[2]}); mend: give them a Python with the extra 'reconcile', "
            "see docs/spark.md"
        )
    result = ReconcileError(f"a task failed on Spark: {last[0]}")
    result.add_note(trace[: last.end()])
    return result
