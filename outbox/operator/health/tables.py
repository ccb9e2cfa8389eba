"""Do the settings fit together; are our tables there, as this code expects them, with their indexes, and vacuumed?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from outbox.database.failure import sqlstate
from outbox.operator.health import sql
from outbox.operator.health.examination import NotInspected

if TYPE_CHECKING:
    from outbox.operator.health.examination import Examination
    from outbox.operator.health.rules import Diagnosis


def settings(examination: Examination) -> Iterator[Diagnosis]:
    """Settings that contradict each other are refused wherever they are read: nothing starts with them."""
    if examination.refused is not None:
        yield examination.finding("settings.refused", {"error": str(examination.refused)})


def retention_of_consumers(examination: Examination) -> Iterator[Diagnosis]:
    """A consumer's own retries may last longer than those of the settings, for which the inbox was made to remember."""
    if examination.subscriptions is None:
        raise NotInspected("the application and its consumers aren't known")
    known = examination.settings
    for each in examination.subscriptions:
        retries = sum(each.retry_delays) * (1 + known.retry_jitter)
        needed = known.retention + retries
        if known.inbox_retention < needed:
            details = {"group": each.group, "topic": each.topic, "retries": retries, "needed": needed}
            yield examination.finding("settings.retries", details | {"inbox_retention": known.inbox_retention})


def migrations(examination: Examination) -> Iterator[Diagnosis]:
    """Which parts are installed, and are they of this code's version?"""
    from outbox.database import migration  # noqa: PLC0415 - Alembic is slow to import
    from outbox.database.migration import chain  # noqa: PLC0415

    schema = examination.schema
    try:
        with examination.reading() as connection:
            revisions = migration.current(connection, schema)
    except DBAPIError as error:
        if sqlstate(error) != "42501":
            raise
        server = examination.server
        details = {"role": server.role_name, "schema": schema}
        yield examination.finding("tables.unreadable", details, quoted_role=server.role)
        return
    examination.revisions = revisions
    examination.parts = tuple(part for part in chain.PARTS if revisions[part] == chain.head(part))
    if not any(revisions[part] for part in chain.PARTS):
        partly = revisions["common"] is not None
        yield examination.finding(
            "tables.partly" if partly else "tables.missing", {"revisions": revisions}, schema=schema
        )
        return
    for branch, revision in revisions.items():
        expected = chain.head(branch)
        if revision in {None, expected}:
            continue
        yield examination.finding(
            "tables.older" if chain.known(str(revision)) else "tables.newer",
            {"part": branch, "database": revision, "expected": expected},
            options=f" --part {branch}" if branch in chain.PARTS else "",
        )


def differences(examination: Examination) -> Iterator[Diagnosis]:
    """Columns, defaults, constraints and indexes; storage parameters are the operator's own business."""
    from outbox.database import migration  # noqa: PLC0415

    if not examination.parts:
        raise NotInspected("there are no tables of this code's version to compare with")
    if examination.server.standby:
        raise NotInspected("the comparison needs temporary tables, which can't be made on a standby")
    if not examination.server.makes_temporary_tables:
        role, database = examination.server.role, examination.server.database
        raise NotInspected(f"the comparison needs temporary tables; GRANT TEMPORARY ON DATABASE {database} TO {role};")
    # Other rules find these.
    known = (
        *(f"index {name} of {table} is " for name, table, _ in _invalid(examination)),
        *(f"table {name} is '" for name in examination.tables()),
        "common is at revision ",
    )
    timeout = examination.thresholds.statement
    lines = migration.check(examination.engine, examination.parts, examination.schema, timeout=timeout)
    lines = [line for line in lines if not line.startswith(known)]
    if lines:
        more = f", and {len(lines) - 3} more" if len(lines) > 3 else ""
        yield examination.finding("tables.differ", {"differences": lines}, first="; ".join(lines[:3]), others=more)


def indexes(examination: Examination) -> Iterator[Diagnosis]:
    """CREATE or REINDEX … CONCURRENTLY leaves an invalid index behind when it fails: written to, and never read."""
    from outbox.database.tables import common_tables, consumer_tables, producer_tables  # noqa: PLC0415

    tables = [table for make in (common_tables, producer_tables, consumer_tables) for table in make().tables.values()]
    ours = {index.name for table in tables for index in table.indexes} | {table.primary_key.name for table in tables}
    for name, table, quoted in _invalid(examination):
        known = name in ours
        details = {"index": name, "table": table, "known": known}
        yield examination.finding("index.invalid", details, verb="REINDEX" if known else "DROP", quoted=quoted)


def autovacuum(examination: Examination) -> Iterator[Diagnosis]:
    """Without it dead rows and old statistics make every pass slower, and the server stops in the end."""
    codes = {"autovacuum": "autovacuum.off", "track_counts": "autovacuum.track_counts"}
    for name, parameter in examination.parameters(*codes).items():
        if parameter.value == "off":
            mend = examination.set_to(parameter, "on")
            yield examination.finding(codes[name], {"source": parameter.source}, mend=mend)
    if examination.parts:
        (rows,) = examination.read(sql.autovacuum_off(examination.schema, examination.tables()))
        for table, option in rows:
            yield examination.finding("autovacuum.table", {"table": table, "option": option})


def _invalid(examination: Examination) -> list[tuple[str, str, str]]:
    (rows,) = examination.read(sql.invalid_indexes(examination.schema, examination.tables()))
    return [(name, table, quoted) for name, table, quoted in rows]
