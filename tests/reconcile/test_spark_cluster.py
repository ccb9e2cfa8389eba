"""An executor that is a process of its own: what is sent to it is all that it needs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pyarrow as pa
import pytest

from outbox.reconcile.job import Spark
from outbox.reconcile.pairing import LocalEngine
from outbox.reconcile.spark.frames import SparkEngine, results
from tests.reconcile.spark_fixtures import Night, night
from tests.reconcile.spark_rows import summed

__all__ = ["night"]


WITHOUT_LIBPQ = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"psycopg", "psycopg_binary", "psycopg_c", "psycopg2", "asyncpg"}:
            raise ImportError(f"no pq wrapper available for {name}")


sys.meta_path.insert(0, Missing())
import pickle

from outbox.reconcile.spark.frames import answers

comparison, tasks = pickle.load(sys.stdin.buffer)
sent = [answer["answer"][0].as_py() for task in tasks for answer in answers(comparison(task))]
pickle.dump(sent, sys.stdout.buffer)
"""


def test_a_task_needs_no_libpq(night: Night) -> None:
    """An executor has the libraries of the extra, and no libpq but that of ADBC: it reads all the same."""
    sent = pickle.dumps((night.comparison, night.tasks(1)))
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBPQ], input=sent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = results(pa.table({"answer": pickle.loads(done.stdout)}))  # noqa: S301 - from our own process
    assert summed([found]) == summed(list(LocalEngine(2).run(night.comparison, night.tasks(), lambda _: None)))


@pytest.mark.slow
def test_executors_elsewhere_run_the_package_of_the_driver(night: Night) -> None:
    """An executor with nothing of ours but what the driver sends finds what the local engine finds."""

    def homes(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import outbox

        yield pa.RecordBatch.from_pydict({"home": [outbox.__file__]})

    conf = {
        "spark.master": "local-cluster[1,2,1024]",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"],
    }
    with SparkEngine(Spark(conf), 2) as engine:
        result = list(engine.run(night.comparison, night.tasks(), lambda _: None))
        found = engine.session.spark.range(0, 2, 1, 2).mapInArrow(homes, "home string").toArrow()["home"].to_pylist()
    assert summed(result) == summed(list(LocalEngine(2).run(night.comparison, night.tasks(), lambda _: None)))
    assert found
    assert all(".zip/outbox/" in home for home in found)
