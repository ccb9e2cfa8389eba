"""Spark's own JDBC source: the same result as the Arrow path, and no password anywhere. Needs the driver's jar."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import make_url

from outbox.errors import SourceError
from outbox.reconcile.compare import LocalEngine
from outbox.reconcile.job import Access, Spark
from outbox.reconcile.source import PostgresSide
from outbox.reconcile.spark.engine import SparkEngine
from outbox.reconcile.spark.tasks import planned_by_jdbc
from tests.reconcile import spark_secrets
from tests.reconcile.spark_fixtures import Night, night
from tests.reconcile.spark_rows import findings, summed

__all__ = ["night"]

JAR = Path(os.environ.get("OUTBOX_JDBC_JAR", "/usr/share/java/postgresql.jar"))

pytestmark = pytest.mark.skipif(
    not JAR.is_file(),
    reason=f"no PostgreSQL driver at {JAR}; name one in OUTBOX_JDBC_JAR (Debian: libpostgresql-jdbc-java)",
)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the event log."""
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def engine(events: Path) -> Iterator[SparkEngine]:
    """The engine, reading by JDBC, with web page and event log."""
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(events),
        "spark.eventLog.compress": "false",
    }
    with SparkEngine(Spark(jdbc_jar=JAR, ui=True, conf=conf), 2) as opened:
        yield opened


@pytest.mark.parametrize("number", [1, 20])
def test_the_result_is_that_of_the_local_engine(engine: SparkEngine, night: Night, number: int) -> None:
    """Read by JDBC, Spark finds and counts what threads of this process do."""
    result = list(engine.run(night.comparison, night.tasks(number), lambda _: None))
    assert summed(result) == summed(list(LocalEngine(2).run(night.comparison, night.tasks(3), lambda _: None)))
    assert sum(map(findings, result)) == 200


def test_a_database_that_cant_be_read_is_told_in_one_line(
    engine: SparkEngine, night: Night, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the driver says comes out in one line, without Java's trace, and nothing on stderr."""
    side = cast("PostgresSide", night.comparison.producer)
    url = make_url(side.access.url).set(database="no_such_database").render_as_string(hide_password=False)
    broken = replace(night.comparison, producer=replace(side, access=Access(url, side.access.settings)))
    with pytest.raises(SourceError, match='database "no_such_database" does not exist') as caught:
        list(engine.run(broken, night.tasks(), lambda _: None))
    shown = "".join(traceback.format_exception(caught.value))
    assert "java" not in shown
    assert not spark_secrets.told(shown)
    assert capfd.readouterr() == ("", "")


def test_the_password_is_nowhere(engine: SparkEngine, night: Night, events: Path) -> None:
    """Neither plan nor settings, neither web page nor event log hold the password."""
    list(engine.run(night.comparison, night.tasks(), lambda _: None))
    plan = spark_secrets.plans(planned_by_jdbc(engine.session.spark, night.comparison, night.tasks(), 2))
    assert "JDBCRelation" in plan
    seen = {
        "plan": plan,
        "settings": spark_secrets.settings(engine.session),
        **dict(spark_secrets.pages(engine.session)),
        **dict(spark_secrets.files(events)),
    }
    assert any("SparkListenerSQLExecutionStart" in text for text in seen.values())
    assert [name for name, text in seen.items() if spark_secrets.told(text)] == []
