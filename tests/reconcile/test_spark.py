"""The Spark engine: the same result as in this process, errors in one line, and no password anywhere."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from sqlalchemy import Dialect, create_engine, event, make_url, text

from outbox.errors import ReconcileError, SourceError
from outbox.reconcile.job import Access, Spark
from outbox.reconcile.pairing import LocalEngine
from outbox.reconcile.rows import Rules
from outbox.reconcile.source import PostgresSide
from outbox.reconcile.spark.frames import SparkEngine, planned
from tests.kit import wait_until
from tests.reconcile import spark_secrets
from tests.reconcile.spark_fixtures import Night, night
from tests.reconcile.spark_rows import PASSWORD, findings, summed

__all__ = ["night"]

LOG_EVERYTHING = """
status = off
appender.file.type = File
appender.file.name = file
appender.file.fileName = {folder}/spark.log
appender.file.layout.type = PatternLayout
rootLogger.level = info
logger.python.name = org.apache.spark.api.python
logger.python.level = trace
# Spark takes this one's level for that of all, and tells so, unless it is.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = info
logger.scheduler.name = org.apache.spark.scheduler
logger.scheduler.level = trace
rootLogger.appenderRef.file.ref = file
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for Spark's log, at its most talkative, and its event log."""
    folder = tmp_path_factory.mktemp("spark")
    (folder / "events").mkdir()
    (folder / "log4j2.properties").write_text(LOG_EVERYTHING.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def engine(logs: Path) -> Iterator[SparkEngine]:
    """The engine, with web page, event log and a full log."""
    conf = {
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logs / 'log4j2.properties'}",
        "spark.ui.enabled": "true",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(logs / "events"),
        "spark.eventLog.compress": "false",
    }
    with SparkEngine(Spark(conf), 2) as opened:
        yield opened


def elsewhere(night: Night, database: str) -> PostgresSide:
    """Return a producer's side in a database that isn't there."""
    side = cast("PostgresSide", night.comparison.producer)
    url = make_url(side.access.url).set(database=database).render_as_string(hide_password=False)
    return replace(side, access=Access(url, side.access.settings))


@pytest.mark.parametrize("number", [1, 7, 15])
def test_the_result_is_that_of_the_local_engine(engine: SparkEngine, night: Night, number: int) -> None:
    """However the ids are cut into tasks, Spark finds and counts what threads of this process do."""
    mine: list[int] = []
    result = list(engine.run(night.comparison, night.tasks(number), mine.append))
    assert summed(result) == summed(list(LocalEngine(2).run(night.comparison, night.tasks(3), lambda _: None)))
    assert sum(map(findings, result)) == 200
    assert mine == sorted(mine)
    assert mine[-1] == number


def test_the_web_page_is_on_loopback(engine: SparkEngine) -> None:
    """The web page that was asked for can't be reached from elsewhere, nor can anything else of Spark."""
    assert str(engine.session.spark.sparkContext.uiWebUrl).startswith("http://127.0.0.1:")
    (java,) = (each for each in psutil.Process().children() if each.name() == "java")
    listening = {each.laddr.ip for each in java.net_connections() if each.status == psutil.CONN_LISTEN}
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_nothing_to_do_starts_nothing(night: Night) -> None:
    """Without tasks there is no result, and Spark isn't started for it."""
    engine = SparkEngine(Spark({"spark.master": "spark://nowhere.invalid:7077"}), 2)
    assert list(engine.run(night.comparison, [], lambda _: None)) == []


def test_a_source_that_cant_be_read_is_told_in_one_line(
    engine: SparkEngine, night: Night, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error is that of the local engine: one line, no Java, no password, and nothing on stderr."""
    broken = replace(night.comparison, producer=elsewhere(night, "no_such_database"))
    with pytest.raises(SourceError) as local:
        list(LocalEngine(2).run(broken, night.tasks(), lambda _: None))
    with pytest.raises(SourceError) as caught:
        list(engine.run(broken, night.tasks(), lambda _: None))
    assert str(caught.value) == str(local.value)
    assert "no_such_database" in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert "java" not in shown
    assert not spark_secrets.told(shown)
    assert capfd.readouterr() == ("", "")


def test_a_refused_password_isnt_shown(engine: SparkEngine, night: Night) -> None:
    """A login that fails says so without saying what was tried."""
    side = elsewhere(night, "no_matter")
    wrong = make_url(night.consumer).set(username="nobody_here", password=PASSWORD)
    side = replace(side, access=Access(wrong.render_as_string(hide_password=False), side.access.settings))
    with pytest.raises(SourceError, match="nobody_here") as caught:
        list(engine.run(replace(night.comparison, producer=side), night.tasks(), lambda _: None))
    assert not spark_secrets.told("".join(traceback.format_exception(caught.value)))


def test_a_task_that_breaks_is_told_in_one_line(engine: SparkEngine, night: Night) -> None:
    """What nobody expected names the error in one line; the trace of the task, but none of Java, is its note."""
    broken = replace(night.comparison, rules=cast("Rules", None))
    with pytest.raises(ReconcileError) as caught:
        list(engine.run(broken, night.tasks(), lambda _: None))
    assert str(caught.value).startswith("a task failed on Spark: AttributeError: 'NoneType'")
    assert "\n" not in str(caught.value)
    (note,) = caught.value.__notes__
    assert "rows.py" in note
    assert "java" not in note


def test_ctrl_c_ends_the_job_though_the_database_doesnt_answer(engine: SparkEngine, night: Night) -> None:
    """While all tasks wait for a lock, Ctrl-C comes through, and nothing of the job is left running."""
    admin = create_engine(night.consumer)
    # Within a transaction, what others do is read but once.
    watcher = admin.execution_options(isolation_level="AUTOCOMMIT")
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )

    def interrupt() -> None:
        with watcher.connect() as other:
            wait_until(lambda: other.scalar(waiting), "a task that waits for the lock")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    tracker = engine.session.spark.sparkContext.statusTracker()
    with admin.begin() as connection:
        connection.execute(text("LOCK TABLE outbox.consumer_message IN ACCESS EXCLUSIVE MODE"))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            list(engine.run(night.comparison, night.tasks(), lambda _: None))
        wait_until(lambda: not tracker.getActiveJobsIds(), "no job is running")
    thread.join()
    admin.dispose()
    assert sum(map(findings, engine.run(night.comparison, night.tasks(), lambda _: None))) == 200


def test_a_session_that_is_there_is_taken_and_left_as_it_is(engine: SparkEngine, night: Night) -> None:
    """A second engine uses the session of the process, leaves its settings alone, and doesn't stop it."""
    owner = engine.session.spark
    owner.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    conf = {"spark.sql.shuffle.partitions": "3"}
    with SparkEngine(Spark(conf), 2) as guest:
        assert sum(map(findings, guest.run(night.comparison, night.tasks(), lambda _: None))) == 200
        assert guest.session.spark.conf.get("spark.sql.shuffle.partitions") == "3"
    assert owner.conf.get("spark.sql.shuffle.partitions") != "3"
    assert owner.range(3).count() == 3


@pytest.fixture(scope="module")
def shown(engine: SparkEngine, night: Night) -> None:
    """The comparison has been run, so that there is something to show."""
    list(engine.run(night.comparison, night.tasks(), lambda _: None))


def test_the_password_is_in_no_plan(engine: SparkEngine, night: Night) -> None:
    """What Spark explains of the query holds no password."""
    frame = planned(engine.session.spark, night.comparison, night.tasks(), 2)
    plan = spark_secrets.plans(frame)
    assert "MapInArrow" in plan
    assert not spark_secrets.told(plan)


def test_the_password_is_in_no_setting(engine: SparkEngine, shown: None) -> None:
    """Neither Spark's settings nor Java's properties hold the password."""
    settings = spark_secrets.settings(engine.session)
    assert "spark.app.name" in settings
    assert not spark_secrets.told(settings)


def test_the_password_is_on_no_page(engine: SparkEngine, shown: None) -> None:
    """No page of the web interface and nothing that its REST interface tells holds the password."""
    seen = dict(spark_secrets.pages(engine.session))
    assert any("MapInArrow" in page for page in seen.values())
    assert [address for address, page in seen.items() if spark_secrets.told(page)] == []


def test_the_password_is_in_no_log(engine: SparkEngine, shown: None, logs: Path) -> None:
    """Neither the event log nor Spark's own log, told to write everything, holds the password."""
    seen = dict(spark_secrets.files(logs))
    assert any("SparkListenerJobEnd" in page for page in seen.values())
    assert any("Finished task" in page for page in seen.values())
    assert [name for name, page in seen.items() if spark_secrets.told(page)] == []


def test_executors_connect_as_the_engine_of_the_application_does(engine: SparkEngine, night: Night) -> None:
    """They get a URL with what its listeners say at that time; that of the engine alone leads nowhere."""
    side = cast("PostgresSide", night.comparison.producer)
    address = make_url(side.access.url)
    source = create_engine("postgresql+psycopg://no_such_role@127.0.0.1:1/nowhere")

    @event.listens_for(source, "do_connect")
    def say_where(dialect: Dialect, _: object, __: object, parameters: dict[str, Any]) -> None:
        parameters.update(dialect.create_connect_args(address)[1])

    access = Access(str(source.url), side.access.settings, source)
    comparison = replace(night.comparison, producer=replace(side, access=access))
    assert sum(map(findings, engine.run(comparison, night.tasks(3), lambda _: None))) == 200
