"""An executor that is a process of its own: what is sent to it is all that it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
import pytest

from outbox.reconcile.compare import LocalEngine
from outbox.reconcile.job import Spark
from outbox.reconcile.spark.engine import SparkEngine
from tests.reconcile.spark_fixtures import Night, night
from tests.reconcile.spark_rows import summed

__all__ = ["night"]


@pytest.mark.slow
def test_executors_elsewhere_run_the_package_of_the_driver(night: Night) -> None:
    """An executor with nothing of ours but what the driver sends finds what the local engine finds."""

    def homes(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import outbox

        yield pa.RecordBatch.from_pydict({"home": [outbox.__file__]})

    conf = {"spark.executor.memory": "512m", "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"]}
    with SparkEngine(Spark(master="local-cluster[1,2,1024]", conf=conf), 2) as engine:
        result = list(engine.run(night.comparison, night.tasks(), lambda _: None))
        found = engine.session.spark.range(0, 2, 1, 2).mapInArrow(homes, "home string").toArrow()["home"].to_pylist()
    assert summed(result) == summed(list(LocalEngine(2).run(night.comparison, night.tasks(), lambda _: None)))
    assert found
    assert all(".zip/outbox/" in home for home in found)
