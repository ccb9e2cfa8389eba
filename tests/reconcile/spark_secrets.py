"""Everything in which Spark could show a password: its pages, its REST interface, its settings, its event log."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pyspark.sql import DataFrame

from outbox.reconcile.spark.session import Session
from tests.reconcile.spark_rows import PASSWORD

#: Each way in which the password could be written.
FORMS = (PASSWORD, quote(PASSWORD), quote(PASSWORD, safe=""), json.dumps(PASSWORD)[1:-1], PASSWORD[6:])

_PAGES = ("jobs/", "stages/", "storage/", "environment/", "executors/", "SQL/")
_REST = (
    "jobs",
    "stages?details=true",
    "executors",
    "allexecutors",
    "environment",
    "sql?details=true&planDescription=true",
)


def told(text: str) -> bool:
    """Does a text hold the password, in whatever form?"""
    return any(form in text for form in FORMS)


def pages(session: Session) -> Iterator[tuple[str, str]]:
    """Yield the address and the text of every page of the web interface, those of single jobs and queries too."""
    ui = session.spark.sparkContext.uiWebUrl
    assert ui is not None
    (application,) = json.loads(_get(f"{ui}/api/v1/applications"))
    rest = f"{ui}/api/v1/applications/{application['id']}"
    jobs = [f"jobs/job/?id={job['jobId']}" for job in json.loads(_get(f"{rest}/jobs"))]
    queries = [f"SQL/execution/?id={query['id']}" for query in json.loads(_get(f"{rest}/sql"))]
    assert jobs
    assert queries
    for address in (*(f"{ui}/{page}" for page in (*_PAGES, *jobs, *queries)), *(f"{rest}/{page}" for page in _REST)):
        yield address, _get(address)


def plans(frame: DataFrame) -> str:
    """Return all that Spark says of a plan."""
    executed = frame._jdf.queryExecution()
    mode = frame._sc._jvm.org.apache.spark.sql.execution.ExplainMode  # type: ignore[union-attr]
    modes = [mode.fromString(name) for name in ("extended", "formatted", "cost", "codegen")]
    return "\n".join([executed.toString(), *(executed.explainString(each) for each in modes)])


def settings(session: Session) -> str:
    """Return all settings: of the context, of the session, and of Java."""
    spark: Any = session.spark
    return "\n".join(
        [
            repr(spark.sparkContext.getConf().getAll()),
            repr(spark.sql("SET -v").collect()),
            spark.sparkContext._jvm.System.getProperties().toString(),
        ]
    )


def files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file in a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes().decode(errors="replace")


def _get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310 - of our own session
        return str(answer.read().decode())
