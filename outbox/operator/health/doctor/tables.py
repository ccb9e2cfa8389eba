"""Are our tables there, as this code expects them, with all their indexes, and vacuumed?"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sqlalchemy.exc import DBAPIError

from outbox.database.failure import sqlstate
from outbox.errors import pip_install
from outbox.operator.health.doctor import sql
from outbox.operator.health.doctor.activity import parameters, set_to
from outbox.operator.health.doctor.patient import Patient, Unseen
from outbox.operator.health.doctor.report import Finding, problem


def require(patient: Patient, parts: Collection[str]) -> None:
    """Make sure that the tables of these parts can be read.

    Raises:
        Unseen: they aren't here, or not as this code knows them.
    """
    for part in parts:
        if part in patient.parts:
            continue
        if patient.revisions is None:
            raise Unseen(f"it is not known whether the {part}'s tables are here")
        if patient.revisions[part] is None:
            raise Unseen(f"the {part}'s tables are not in this database")
        raise Unseen(f"the {part}'s tables are of another version than this code")


def migrations(patient: Patient) -> Iterator[Finding]:
    """Which parts are installed, and are they of this code's version."""
    from outbox.database import migration  # noqa: PLC0415 - Alembic is slow to import
    from outbox.database.migration import chain  # noqa: PLC0415

    try:
        with patient.reading() as connection:
            revisions = migration.current(connection, patient.schema)
    except DBAPIError as error:
        if sqlstate(error) != "42501":
            raise
        role, schema = patient.server.role, patient.schema
        yield problem(
            "tables.unreadable",
            f"The role {role} may not read schema {schema}, so nothing in it could be looked at.",
            f"GRANT USAGE ON SCHEMA {schema} TO {role};\nGRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role};",
            role=patient.server.role_name, schema=schema,
        )  # fmt: skip
        return
    patient.revisions = revisions
    patient.parts = tuple(part for part in chain.PARTS if revisions[part] == chain.head(part))
    if not any(revisions[part] for part in chain.PARTS):
        partly = revisions["common"] is not None
        yield problem(
            "tables.partly" if partly else "tables.missing",
            f"Of the outbox, only the tables common to both sides are in schema {patient.schema!r}."
            if partly
            else f"There are no outbox tables in schema {patient.schema!r} of this database.",
            f"{patient.command('db upgrade')}\nadd --part producer or --part consumer where only one side is used",
            revisions=revisions,
        )
        return
    for branch, revision in revisions.items():
        wanted = chain.head(branch)
        if revision in {None, wanted}:
            continue
        part = f" --part {branch}" if branch in chain.PARTS else ""
        older = chain.known(str(revision))
        yield problem(
            "tables.older" if older else "tables.newer",
            f"The {branch} tables are at {revision}, {'older' if older else 'newer'} than this code ({wanted}).",
            patient.command(f"db upgrade{part}") if older else pip_install(),
            part=branch, database=revision, expected=wanted,
        )  # fmt: skip


def differences(patient: Patient) -> Iterator[Finding]:
    """Columns, defaults, constraints and indexes; storage parameters are the operator's own business."""
    from outbox.database import migration  # noqa: PLC0415

    if not patient.parts:
        raise Unseen("there are no tables of this code's version to compare with")
    if patient.server.standby:
        raise Unseen("the comparison needs temporary tables, which can't be made on a standby")
    (((may,),),) = patient.read(sql.may_make_temporary_tables())
    if not may:
        role, database = patient.server.role, patient.server.database
        raise Unseen(f"the comparison needs temporary tables; GRANT TEMPORARY ON DATABASE {database} TO {role};")
    told = [f"index {name} of {table} is " for name, table, _ in _invalid(patient)]
    told += [f"table {name} is '" for name in patient.tables()]
    told += ["common is at revision "]
    lines = migration.check(patient.engine, patient.parts, patient.schema, timeout=patient.limits.statement)
    lines = [line for line in lines if not _begins(line, told)]
    if lines:
        more = f", and {len(lines) - 3} more" if len(lines) > 3 else ""
        yield problem(
            "tables.differ",
            f"The tables differ from what this code expects: {'; '.join(lines[:3])}{more}.",
            f"see all: {patient.command('db check')}\nhow each is made: outbox db sql",
            differences=lines,
        )


def indexes(patient: Patient) -> Iterator[Finding]:
    """CREATE or REINDEX … CONCURRENTLY leaves an invalid index behind when it fails: written to, and never read."""
    from outbox.database.tables import common_tables, consumer_tables, producer_tables  # noqa: PLC0415

    tables = [table for make in (common_tables, producer_tables, consumer_tables) for table in make().tables.values()]
    ours = {index.name for table in tables for index in table.indexes} | {table.primary_key.name for table in tables}
    for name, table, quoted in _invalid(patient):
        known = name in ours
        yield problem(
            "index.invalid",
            f"The index {name} of {table} is invalid: every write pays for it, and no statement can use it.",
            f"{'REINDEX INDEX' if known else 'DROP INDEX'} CONCURRENTLY {quoted};",
            index=name, table=table, known=known,
        )  # fmt: skip


def autovacuum(patient: Patient) -> Iterator[Finding]:
    """Without it dead rows and old statistics make every pass slower, and the server stops in the end."""
    found = parameters(patient, "autovacuum", "track_counts")
    if found["autovacuum"].value == "off":
        yield problem(
            "autovacuum.off",
            "autovacuum is off: dead rows pile up, the planner's statistics grow old, and in the end there are no "
            "transaction ids left.",
            set_to(patient, found["autovacuum"], "on"),
        )
    if found["track_counts"].value == "off":
        yield problem(
            "autovacuum.track_counts",
            "track_counts is off: autovacuum can't know which tables need it, and does nothing.",
            set_to(patient, found["track_counts"], "on"),
            source=found["track_counts"].source,
        )
    if patient.parts:
        (rows,) = patient.read(sql.autovacuum_off(patient.schema, patient.tables()))
        for table, option in rows:
            yield problem(
                "autovacuum.table",
                f"Autovacuum is off for {table} ({option}): its dead rows pile up.",
                f"ALTER TABLE {table} RESET ({option});",
                table=table, option=option,
            )  # fmt: skip


def _invalid(patient: Patient) -> list[tuple[str, str, str]]:
    (rows,) = patient.read(sql.invalid_indexes(patient.schema, patient.tables()))
    return [(name, table, quoted) for name, table, quoted in rows]


def _begins(line: str, beginnings: list[str]) -> bool:
    return any(line.startswith(beginning) for beginning in beginnings)
