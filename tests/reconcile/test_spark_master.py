"""Which database Spark reaches from where it runs; what its errors say. Without Spark."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from outbox.errors import InvalidSettings, ReconcileError
from outbox.reconcile.spark.session import Master, package_zip, refuse_loopback, translated


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that says nothing of PostgreSQL."""
    for name in ("PGHOST", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)


LOOPBACK = ["localhost", "127.0.0.1", "127.8.9.1", "[::1]", "db.localhost", ""]
ELSEWHERE = [
    "spark://master:7077",
    "spark://10.0.0.1:7077,127.0.0.1:7077",
    "yarn",
    "k8s://https://127.0.0.1:6443",
    "sc://connect",
]


@pytest.mark.parametrize("host", LOOPBACK)
@pytest.mark.parametrize("master", ELSEWHERE)
def test_a_database_on_loopback_is_refused_elsewhere(master: str, host: str) -> None:
    """An executor elsewhere would look on its own host: the error names the host and the mend."""
    with pytest.raises(InvalidSettings, match=rf"{host.strip('[]') or 'local socket'}.*mend: name the database by"):
        refuse_loopback(Master(master), f"postgresql://u:secret@{host}/shop")


@pytest.mark.parametrize(
    "master",
    ["local[2]", "local-cluster[2,1,1024]", "spark://127.0.0.1:7077", "sc://localhost:15002", "spark://[::1]:7077"],
)
@pytest.mark.parametrize("host", LOOPBACK)
def test_a_database_on_loopback_is_right_on_the_same_host(master: str, host: str) -> None:
    """Where master and executors are on this host, its loopback is theirs."""
    refuse_loopback(Master(master), f"postgresql://u@{host}/shop")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u@db.example/shop",
        "postgresql://u@10.1.2.3/shop",
        "postgresql:///shop?host=db1,db2",
        "postgresql:///?service=shop",
    ],
)
def test_a_database_that_others_reach_is_accepted(url: str) -> None:
    """Names and addresses of other hosts are, and so is what the executors' own files say."""
    refuse_loopback(Master("yarn"), url)


def test_one_of_many_hosts_on_loopback_is_refused() -> None:
    """libpq's list of hosts counts host by host, and so does a socket's folder."""
    for url in ("postgresql:///shop?host=db1,localhost", "postgresql:///shop?host=/run/postgresql"):
        with pytest.raises(InvalidSettings):
            refuse_loopback(Master("yarn"), url)


def test_the_zip_holds_the_package_and_is_always_the_same(tmp_path: Path) -> None:
    """Executors get every module; the same files make the same zip, so that Spark takes two for one."""
    first, second = package_zip(tmp_path), package_zip(tmp_path / ".." / tmp_path.name)
    assert first.name == second.name
    (tmp_path / "again").mkdir()
    assert package_zip(tmp_path / "again").read_bytes() == first.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert {"outbox/__init__.py", "outbox/reconcile/spark/frames.py"} <= set(archive.namelist())
        assert archive.testzip() is None


PYTHON = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "a.py", line 3, in f
ModuleNotFoundError: No module named 'pyarrow'

\tat org.apache.spark.api.python.BasePythonRunner.x
"""
JAVA = """An error occurred while calling o55.count.
: org.apache.spark.SparkException: Job aborted
\tat a.b
Caused by: java.io.IOException: No space left on device
\tat c.d
"""


@pytest.mark.parametrize(
    ("trace", "kind", "said"),
    [
        (PYTHON, ReconcileError, "Spark's executors miss a library (No module named 'pyarrow'); mend: "),
        (JAVA, ReconcileError, "Spark failed: No space left on device"),
        ("", ReconcileError, "Spark failed: RuntimeError"),
    ],
)
def test_a_trace_becomes_one_line(trace: str, kind: type[ReconcileError], said: str) -> None:
    """Of a hundred lines the one that says what happened is left."""
    error = translated(RuntimeError(trace))
    assert type(error) is kind
    assert str(error).startswith(said)
    assert "\n" not in str(error)
