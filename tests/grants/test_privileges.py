"""Each role of ours has what its duties need, and nothing more: with all GRANTs they are done, without any one not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine

from outbox.check import sql as check_sql
from outbox.compensate import sql as compensate_sql
from outbox.consumer import sql as consumer_sql
from outbox.database import execute as execute_module
from outbox.database import identity
from outbox.database.dialect import UNPREPARED
from outbox.database.duty import PARTS, Part, duties
from outbox.database.execute import Statement, in_schema
from outbox.operator.health import sql as health_sql
from outbox.operator.health.grants import ROLES, granting, needs_of
from outbox.prune import rewrite
from outbox.prune import sql as prune_sql
from outbox.reconcile.record import settled
from outbox.reconcile.record.timetable import RunRequest
from outbox.reconcile.source import PostgresSide, rendered
from tests.grants.town import ACTS, Town

Acts = Mapping[str, Any]
_ID = UUID(int=0)
_ITEM = {"group": "g", "groups": ["g"], "id": _ID, "bulk_jobs": [_ID]}
#: What is executed so seldom that no duty's test comes to it: an answer that is given back, a quarantine that is
#: dropped, an offset that goes back, a difference since the last comparison, an old segment of the inbox, a sequence.
SELDOM: Mapping[tuple[str, str], Sequence[Statement]] = {
    ("check", "producer"): [check_sql.unasked("outbox", half_id=_ID, checks=0, id=0)],
    ("compensate", "consumer"): [compensate_sql.drop("outbox", **_ITEM)],
    ("consume", "consumer"): [
        consumer_sql.forget("outbox", "g", _ID),
        identity._NOTE("outbox", topic="new", id=_ID, address="there"),
    ],
    # The default of an op: of what is there already, as when this is said once more, there is none.
    ("intake", "producer"): [Statement("SELECT nextval('outbox.op_sequence')")],
    ("report", "consumer"): [identity.sources("outbox")],
    ("prune", "consumer"): [prune_sql.hold("outbox", group="g", topic="t", first=_ID, ids=[_ID], asked_ms=0)],
    ("look", "producer"): [
        health_sql.GAPS("outbox", limit=1),
        Statement("SELECT number FROM outbox.published ORDER BY id DESC LIMIT 1000"),
    ],
    ("look", "consumer"): [health_sql.HOLDING("outbox", first=_ID, end=UUID(int=1), limit=1)],
    ("runs", "producer"): [RunRequest("all", "t", "g").send("outbox", _ID)],
    ("reconcile", "producer"): [
        Statement(
            in_schema(settled._TOUCHED_AT_PRODUCER, "outbox"),
            {"bounds": [_ID], "snapshot": "1:1:", "queues": [0], "positions": [0], "topic": "t"},
        )
    ],
}
#: What has rights, and in the database of which part.
DUTIES = [(duty.name, each.part) for duty in duties() for each in duty.rights]
#: Who orders has looked before.
BEFORE = {"order": ("look",), "groups": ("look",)}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_can_do_its_duties(town: Town, role: str) -> None:
    """With what `outbox db grants` prints, all that the role is there for is done."""
    duties = ROLES[role]
    with town.acting_as(role):
        done = {ACTS[name, part]: name for part in PARTS for name in duties.duty_names(part)}
        for act in done:
            act(town)
    assert done


def test_sending_in_sql(town: Town) -> None:
    """A producer may also call the functions in SQL, which do as their caller may."""
    with town.acting_as("producer"), town.at["producer"].begin() as connection:
        for sql in (
            "SELECT outbox.send('t', '{}', queue => 0)",
            "SELECT outbox.commit(outbox.prepare('t', '{}'))",
            "SELECT outbox.rollback(outbox.prepare('t', '{}'))",
            "SET CONSTRAINTS ALL IMMEDIATE",
        ):
            connection.exec_driver_sql(sql)
    assert sorted(town.producer.ops().values()) == ["commit", "commit", "rollback"]


def test_every_duty_is_tried() -> None:
    """No duty is declared that no test does."""
    assert set(DUTIES) == set(ACTS)
    assert set(DUTIES) == {(name, part) for role in ROLES.values() for part in PARTS for name in role.duty_names(part)}


@pytest.fixture
def said(town: Town, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Part], Acts]:
    """A function that does a duty as the owner, and returns what was executed in the database of a part."""

    def do(duty: str, part: Part) -> Acts:
        heard: dict[str, Any] = {}
        round_trip, ask = execute_module._round_trip, PostgresSide.ask

        def hear(driver: Any, pairs: Any) -> Any:
            if driver.info.get_parameters().get("application_name") == part:
                heard.update({sql: values for sql, values in pairs if sql not in UNPREPARED})
            return round_trip(driver, pairs)

        def hear_ask(side: PostgresSide, cursor: Any, statement: Statement) -> Any:
            if side.part == part:
                heard[rendered(statement)] = None
            return ask(side, cursor, statement)

        for each in PARTS:
            url = town.owned[each].url.update_query_dict({"application_name": each})
            town.at[each] = create_engine(url, poolclass=NullPool)
        with monkeypatch.context() as patch:
            patch.setattr(execute_module, "_round_trip", hear)
            patch.setattr(PostgresSide, "ask", hear_ask)
            # The owner may rewrite small tables as a whole; who may not goes row by row.
            patch.setattr(rewrite, "_MAY", "SELECT false")
            ACTS[duty, part](town)
        return heard

    return do


def anew(values: Any) -> Any:
    """Return the values of a statement; those of notices with other ids: what is written already isn't again."""
    are_notices = isinstance(values, dict) and "facts" in values
    return {**values, "ids": [uuid4() for _ in values["ids"]]} if are_notices else values


def denied(connection: psycopg.Connection[Any], statements: Acts) -> list[str]:
    """Return which statements the role may not execute; whatever else becomes of them is undone, and no matter."""
    found = []
    for sql, values in statements.items():
        try:
            connection.execute(sql.encode(), values)
        except psycopg.errors.InsufficientPrivilege as error:
            found.append(str(error))
        except psycopg.Error:
            pass
        connection.rollback()
    return found


@pytest.mark.parametrize(("duty", "part"), DUTIES)
def test_a_duty_needs_each_of_its_privileges(
    town: Town, said: Callable[[str, Part], Acts], duty: str, part: Part
) -> None:
    """A role that has just what one duty needs can execute all its statements; without any one privilege, not all."""
    seldom = {each.sql: each.values for each in SELDOM.get((duty, part), ())}
    statements = {sql: anew(values) for sql, values in {**said(duty, part), **seldom}.items()}
    name, needs = "of_one_duty", needs_of((duty,), part)
    with closing(town.admin(part)) as admin:
        admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'hunter2'".encode())
        try:
            admin.execute(f"GRANT USAGE ON SCHEMA outbox TO {name}".encode())
            base = needs_of(BEFORE.get(duty, ()), part)
            for statement in granting([*base, *needs], name):
                admin.execute(statement.encode())
            url = town.owned[part].url.set(drivername="postgresql", username=name, password="hunter2")  # noqa: S106
            with psycopg.connect(url.render_as_string(hide_password=False), options="-c lock_timeout=1s") as connection:
                assert not (d := denied(connection, statements)), "|".join(d)
                idle = []
                for need in needs:
                    (grant,) = granting([need], name)
                    admin.execute(grant.replace("GRANT", "REVOKE", 1).replace(" TO ", " FROM ").encode())
                    if not denied(connection, statements):
                        idle.append(str(need))
                    admin.execute(grant.encode())
                assert idle == [], "|".join(idle)
        finally:
            admin.execute(f"DROP OWNED BY {name}".encode())
            admin.execute(f"DROP ROLE {name}".encode())
