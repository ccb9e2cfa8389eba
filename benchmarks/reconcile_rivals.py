"""Run the alternative of a data engineer: two queries, and a full outer join of an engine that is there already.

All read what decides of a difference (decision, newest send, status, digest of the body) and how long a message took,
and tell what the reconciliation tells: counts, differences, a histogram of the lags. None knows of a grace period or of
what is on its way, keeps a record, or looks twice.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import make_url

from benchmarks.reconcile_arms import AT_END, Found, Place
from benchmarks.reconcile_fill import GROUP, TOPIC

_PARTITIONS = 8
#: The first id of a part, and that before which it ends; None is the end of all.
Bound = tuple[str | None, str | None]
_WORK_MEM = "SET work_mem = '512MB'"

# {of_…} bounds a part of the ids, table by table: PostgreSQL wouldn't carry a bound over from one to the others.
_SENT = f"""
SELECT {{id}} AS id, o.resolution, m.send_number, m.visible_at, h.body_digest AS digest
  FROM (SELECT id, body_digest FROM outbox.half_message WHERE topic = '{TOPIC}'{{of_id}}) h
  LEFT JOIN (SELECT half_id, resolution FROM outbox.op_message WHERE true{{of_half_id}}) o ON o.half_id = h.id
  LEFT JOIN (SELECT DISTINCT ON (half_id) half_id, send_number, visible_at FROM outbox.message
              WHERE true{{of_half_id}} ORDER BY half_id, send_number DESC) m ON m.half_id = h.id
"""
_HANDLED = f"""
SELECT {{id}} AS id, status, changed_at, body_digest AS digest FROM {{inbox}}
 WHERE consumer_group = '{GROUP}' AND topic = '{TOPIC}'{{of_message_id}}
"""

# In the SQL that PostgreSQL, Spark and DuckDB have in common, but for {lag}, the microseconds it took.
_JOINED = """
SELECT coalesce(s.id, c.id) AS id,
       CASE WHEN s.id IS NULL THEN 'phantom'
            WHEN s.resolution IS NULL THEN 'undecided'
            WHEN s.resolution = 'rollback' THEN CASE WHEN c.status = 'consumed' THEN 'consumed_though_rolled_back'
                                                     WHEN c.status IS NOT NULL THEN 'status_mismatch'
                                                     ELSE 'in_sync' END
            WHEN s.digest <> c.digest THEN 'digest_mismatch'
            WHEN s.send_number IS NULL THEN 'undispatched'
            WHEN c.id IS NULL THEN 'missing'
            WHEN c.status IN ('parked', 'failed') THEN c.status
            ELSE 'in_sync' END AS kind,
       CASE WHEN {lag} < 10000 THEN 1 WHEN {lag} < 100000 THEN 2 WHEN {lag} < 1000000 THEN 3
            WHEN {lag} < 10000000 THEN 4 WHEN {lag} < 100000000 THEN 5 WHEN {lag} IS NOT NULL THEN 6 END AS lag
  FROM {sent} s FULL OUTER JOIN {handled} c ON c.id = s.id
"""
# Counts by kind, with a histogram of how long the messages took, and the ids that differ.
_GROUPED = "SELECT kind, lag, count(*), {ids} FROM ({joined}) x GROUP BY kind, lag"


def driver_jar() -> str | None:
    """Return PostgreSQL's JDBC driver: OUTBOX_BENCH_JDBC_JAR, or where Debian's package has it; None without one."""
    path = os.environ.get("OUTBOX_BENCH_JDBC_JAR", "/usr/share/java/postgresql.jar")
    return path if Path(path).is_file() else None


# --- Spark ------------------------------------------------------------------------------------------------


def spark_jdbc(place: Place) -> Callable[[], Found]:
    """Start Spark with the driver; return its join of two reads by ``spark.read.jdbc``, in 8 partitions each."""
    return partial(_by_spark, _spark(place), place, _read)


def spark_jdbc_by_hand(place: Place) -> Callable[[], Found]:
    """Return the same, written with knowledge of PostgreSQL's plans: 8 queries a side, each table bounded."""
    return partial(_by_spark, _spark(place), place, _read_by_hand)


def _spark(place: Place) -> Any:
    from pyspark.sql import SparkSession

    from outbox.reconcile.spark.session import find_java, launcher_home

    folder = tempfile.TemporaryDirectory()
    AT_END.append(folder.cleanup)
    home = launcher_home(find_java(), Path(folder.name))
    os.environ |= {"JAVA_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    settings = {
        "spark.master": "local[2]",
        "spark.jars": str(place.jar),
        "spark.driver.memory": "4g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": str(_PARTITIONS),
    }
    spark = SparkSession.builder.config(map={**settings}).getOrCreate()
    AT_END.append(spark.stop)
    return spark


def _by_spark(spark: Any, place: Place, read: Callable[..., Any]) -> Found:
    bounds = _bounds(place.producer)
    read(spark, place.producer, _sent, bounds).createOrReplaceTempView("sent")
    read(spark, place.consumer, _handled, bounds).createOrReplaceTempView("handled")
    joined = _JOINED.format(
        sent="sent", handled="handled", lag="(unix_micros(c.changed_at) - unix_micros(s.visible_at))"
    )
    ids = "collect_list(CASE WHEN kind <> 'in_sync' THEN id END)"
    return _found(spark.sql(_GROUPED.format(ids=ids, joined=joined)).collect())


def _read(spark: Any, url: str, query: Callable[..., str], bounds: Sequence[Bound]) -> Any:
    predicates = [_of("id", *bound).removeprefix(" AND ") for bound in bounds]
    options = _jdbc(url)
    table = spark.read.jdbc(options.pop("url"), f"({query('{}')}) q", predicates=predicates, properties=options)
    from pyspark.sql import functions

    # As text, which a uuid is to Spark, the ids would be twice as long.
    return table.withColumn("id", functions.unhex(functions.regexp_replace("id", "-", "")))


def _read_by_hand(spark: Any, url: str, query: Callable[..., str], bounds: Sequence[Bound]) -> Any:
    parts = [
        spark.read.format("jdbc").options(**_jdbc(url), query=query("uuid_send({})", *bound)).load() for bound in bounds
    ]
    return reduce(lambda some, more: some.unionAll(more), parts)


def _bounds(url: str) -> list[Bound]:
    """Return ranges of ids with about as many rows each, from the statistics."""
    with _connect(url) as connection:
        ((histogram,),) = connection.execute(
            "SELECT histogram_bounds::text::uuid[] FROM pg_stats WHERE schemaname = 'outbox' "
            "AND tablename = 'half_message' AND attname = 'id'"
        ).fetchall()
    inner = [str(histogram[number * len(histogram) // _PARTITIONS]) for number in range(1, _PARTITIONS)]
    return list(zip([None, *inner], [*inner, None], strict=True))


def _jdbc(url: str) -> dict[str, str]:
    parts = make_url(url)
    return {
        "url": f"jdbc:postgresql://{parts.host}:{parts.port or 5432}/{parts.database}",
        "driver": "org.postgresql.Driver",
        "fetchsize": "10000",
        "sessionInitStatement": "SET work_mem = '64MB'",
        "user": parts.username or "",
        "password": parts.password or "",
    }


# --- PostgreSQL -------------------------------------------------------------------------------------------


def copy_inbox(place: Place) -> None:
    """Bring the inbox into the producer's database, as the table ``copied``."""
    with _connect(place.consumer) as source, _connect(place.producer) as target:
        target.execute("DROP TABLE IF EXISTS copied")
        target.execute("CREATE TABLE copied (LIKE outbox.consumer_message INCLUDING DEFAULTS)")
        with (
            source.cursor().copy("COPY (SELECT * FROM outbox.consumer_message) TO STDOUT (FORMAT binary)") as rows,
            target.cursor().copy("COPY copied FROM STDIN (FORMAT binary)") as copied,
        ):
            for data in rows:
                copied.write(data)
        target.execute("ALTER TABLE copied ADD PRIMARY KEY (consumer_group, message_id)")
        target.commit()
        target.autocommit = True
        target.execute("VACUUM ANALYZE copied")


def one_database(place: Place) -> Callable[[], Found]:
    """Return PostgreSQL's own join, with the inbox in the producer's database (`copy_inbox`)."""
    connection = _connect(place.producer)
    connection.autocommit = True
    connection.execute(_WORK_MEM)
    return partial(_by_postgres, connection)


def _by_postgres(connection: Any) -> Found:
    joined = _JOINED.format(
        sent=f"({_sent('{}')})",
        handled=f"({_handled('{}', inbox='copied')})",
        lag="extract(epoch FROM c.changed_at - s.visible_at)::float8 * 1e6",
    )
    ids = "array_agg(uuid_send(id)) FILTER (WHERE kind <> 'in_sync')"
    return _found(connection.execute(_GROUPED.format(ids=ids, joined=joined)).fetchall())


# --- engines over Arrow -----------------------------------------------------------------------------------


def duckdb(place: Place) -> Callable[[], Found]:
    """Return DuckDB's join of two Arrow tables."""
    return partial(_by_duckdb, importlib.import_module("duckdb").connect(), place)


def _by_duckdb(connection: Any, place: Place) -> Found:
    for name, table in zip(("sent", "handled"), _arrow(place), strict=True):
        connection.register(name, table)
    try:
        joined = _JOINED.format(sent="sent", handled="handled", lag="(epoch_us(c.changed_at) - epoch_us(s.visible_at))")
        ids = "list(id) FILTER (WHERE kind <> 'in_sync')"
        rows = connection.execute(_GROUPED.format(ids=ids, joined=joined)).fetchall()
    finally:
        for name in ("sent", "handled"):
            connection.unregister(name)
    return _found(rows)


#: As its users write it: the tables as they are, and one SQL over them.
_SCANNED = f"""(
SELECT h.id, o.resolution, m.send_number, m.visible_at, h.body_digest AS digest
  FROM producer.outbox.half_message h
  LEFT JOIN producer.outbox.op_message o ON o.half_id = h.id
  LEFT JOIN producer.outbox.message m ON m.half_id = h.id
 WHERE h.topic = '{TOPIC}')"""


def duckdb_scanner(place: Place) -> Callable[[], Found]:
    """Return DuckDB's join of raw tables, which its own PostgreSQL scanner reads."""
    importlib.import_module("duckdb_extensions").import_extension("postgres_scanner")
    connection = importlib.import_module("duckdb").connect()
    connection.execute("LOAD postgres_scanner")
    for name, url in (("producer", place.producer), ("consumer", place.consumer)):
        connection.execute(f"ATTACH '{_libpq(url)}' AS {name} (TYPE postgres, READ_ONLY)")
    handled = f"({_handled('message_id', inbox='consumer.outbox.consumer_message')})"
    lag = "(epoch_us(c.changed_at) - epoch_us(s.visible_at))"
    joined = _JOINED.format(sent=_SCANNED, handled=handled, lag=lag)
    query = _GROUPED.format(ids="list(id) FILTER (WHERE kind <> 'in_sync')", joined=joined)

    def scan() -> Found:
        rows = connection.execute(query).fetchall()
        return _found([(kind, bin_, number, ids and [id_.bytes for id_ in ids]) for kind, bin_, number, ids in rows])

    return scan


def polars(place: Place) -> Callable[[], Found]:
    """Return Polars' join of two Arrow tables."""
    return partial(_by_polars, importlib.import_module("polars"), place)


def _by_polars(pl: Any, place: Place) -> Found:
    sent, handled = (pl.from_arrow(table).lazy() for table in _arrow(place))
    col = pl.col
    undone = pl.when(col("status") == "consumed").then(pl.lit("consumed_though_rolled_back"))
    kind = (
        pl.when(col("sent").is_null()).then(pl.lit("phantom"))
        .when(col("resolution").is_null()).then(pl.lit("undecided"))
        .when(col("resolution") == "rollback")
        .then(undone.when(col("status").is_not_null()).then(pl.lit("status_mismatch")).otherwise(pl.lit("in_sync")))
        .when(col("digest") != col("digest_right")).then(pl.lit("digest_mismatch"))
        .when(col("send_number").is_null()).then(pl.lit("undispatched"))
        .when(col("status").is_null()).then(pl.lit("missing"))
        .when(col("status").is_in(["parked", "failed"])).then(col("status"))
        .otherwise(pl.lit("in_sync"))
    )  # fmt: skip
    joined = sent.with_columns(sent=True).join(handled, on="id", how="full", coalesce=True)
    lag = (col("changed_at") - col("visible_at")).dt.total_microseconds().cut([10.0**n for n in range(4, 9)])
    some = pl.when(col("kind") != "in_sync").then(col("id")).drop_nulls()
    grouped = joined.select("id", kind=kind, lag=lag).group_by("kind", "lag").agg(pl.len(), ids=some)
    return _found(grouped.collect().rows())


def _arrow(place: Place) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(_fetch, (place.producer, place.consumer), (_sent("uuid_send({})"), _handled("uuid_send({})")))
        )


def _fetch(url: str, query: str) -> Any:
    from adbc_driver_postgresql import dbapi

    with dbapi.connect(_libpq(url)) as connection, connection.cursor() as cursor:
        cursor.execute(_WORK_MEM)
        cursor.execute(query)
        return cursor.fetch_arrow_table()


def _found(rows: Iterable[Sequence[Any]]) -> Found:
    return {bytes(id_): kind for kind, _, _, ids in rows for id_ in ids or ()}


# --- queries ----------------------------------------------------------------------------------------------


def _sent(id_: str, first: str | None = None, end: str | None = None) -> str:
    return _SENT.format(id=id_.format("id"), of_id=_of("id", first, end), of_half_id=_of("half_id", first, end))


def _handled(id_: str, first: str | None = None, end: str | None = None, inbox: str = "outbox.consumer_message") -> str:
    return _HANDLED.format(id=id_.format("message_id"), inbox=inbox, of_message_id=_of("message_id", first, end))


def _of(column: str, first: str | None, end: str | None) -> str:
    bounds = ((">=", first), ("<", end))
    return "".join(f" AND {column} {sign} '{bound}'" for sign, bound in bounds if bound is not None)


def _libpq(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def _connect(url: str) -> Any:
    return psycopg.connect(_libpq(url))
