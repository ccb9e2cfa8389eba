"""Two databases that are reconciled."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from outbox import Settings
from outbox.embedded import ServerLike
from outbox.reconcile import plan
from outbox.reconcile.job import Pair, Spark
from outbox.reconcile.record import settled
from outbox.reconcile.spark.session import session
from tests.conftest import SHARE_SPARK
from tests.consumer.conftest import two  # noqa: F401 - a fixture
from tests.kit.databases import clones
from tests.reconcile import mariadb
from tests.reconcile.books import Books
from tests.reconcile.following import Watched, followed
from tests.reconcile.repairing import Night
from tests.reconcile.town import Town

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def town(new_engine: Callable[[], Engine], settings: Settings) -> Iterator[Town]:
    """A producer and a consumer in two databases."""
    with Town(new_engine(), new_engine(), settings) as town:
        yield town


@pytest.fixture
def village(engine: Engine, settings: Settings) -> Iterator[Town]:
    """A producer and a consumer in one database."""
    with Town(engine, engine, settings) as town:
        yield town


@pytest.fixture
def follow(town: Town) -> Iterator[Callable[..., Watched]]:
    """A function that has a follower begin; a day ago, unless told otherwise."""
    with ExitStack() as stack:

        def begin(*pairs: Pair, **options: Any) -> Watched:
            options = {"since": dt.datetime.now(dt.UTC) - dt.timedelta(days=1), **options}
            watched = Watched(town, followed(town, *pairs, **options))
            stack.callback(watched.close)
            return watched

        yield begin


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[UUID]], None]:
    """A function that sets the ids at which ranges are cut, for tables too small to be cut by their pages.

    Settled ranges aren't joined.
    """

    def cut_at(ids: Sequence[UUID]) -> None:
        monkeypatch.setattr(settled, "ROWS_OF_RANGE", 1)
        monkeypatch.setattr(plan, "points", lambda *_: sorted(ids))
        monkeypatch.setattr(plan, "points_between", lambda *_: sorted(ids))

    return cut_at


@pytest.fixture(scope="session")
def _spark() -> Iterator[ExitStack]:
    """Where the session is that modules share, while it is open."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module", autouse=True)
def _spark_of_others(request: pytest.FixtureRequest, _spark: ExitStack) -> None:
    """End the session that modules share before one that doesn't: a session that is there would be taken."""
    if request.path.stem not in SHARE_SPARK:
        _spark.close()


@pytest.fixture
def spark(_spark: ExitStack) -> SparkSession:
    """A session on two threads of this machine, one for all of `SHARE_SPARK`: to start one takes a long while."""
    from pyspark.sql import SparkSession

    if (found := SparkSession.getActiveSession()) is None:
        jars = {"spark.jars": str(mariadb.JAR)} if mariadb.is_there() else {}
        options = Spark(conf={"spark.sql.shuffle.partitions": "3"} | jars)
        found = _spark.enter_context(session(options, 2)).spark
    return found


@pytest.fixture(scope="session")
def _books(server: ServerLike, template: str) -> Iterator[Books]:
    with clones(server, template, "books_producer", "books_consumer") as (producer, consumer):
        books = Books(producer, consumer)
        books.create()
        yield books


@pytest.fixture
def books(_books: Books) -> Books:
    """Two businesses with empty books."""
    _books.empty()
    return _books


@pytest.fixture
def night(new_engine: Callable[[], Engine], settings: Settings) -> Iterator[Night]:
    """Producer and consumer in two databases."""
    with Night(new_engine(), new_engine(), settings) as night:
        yield night
