"""No duty is forgotten by one of those that read the rows: workers, grants, tests of users, commands, docs."""

from __future__ import annotations

import re
import threading

import pytest
from sqlalchemy import create_engine

from outbox import Outbox
from outbox.database import duty as rows
from outbox.database.duty import ROLES, duties
from outbox.database.tables import common_tables, consumer_tables, producer_tables
from outbox.operator.health.grants import ROLES as GRANT_ROLES
from outbox.relay.intake.source import Received
from outbox.worker.clock import Clock
from outbox.worker.plan import Plan, check_roles
from tests.cli.conftest import run_cli
from tests.kit import ROOT

#: What a worker plans by itself: a group's duties share the lanes of its threads, and the report tells of all others.
OF_A_GROUP = {"consume", "retry"}
#: What the functions of an application are called by in its tests, otherwise than by their duty's name.
TRIED = {"consume": "drain", "runs": "outbox reconcile", "reconcile": "outbox reconcile"}


def test_each_row_is_in_the_list() -> None:
    """The modules that declare duties are those that are listed."""
    package = ROOT / "outbox"
    declaring = [path for path in package.rglob("*.py") if re.search(r"^DUTIES = ", path.read_text(), re.MULTILINE)]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in declaring]
    assert sorted(names) == sorted(rows.MODULES)
    assert len({duty.name for duty in duties()}) == len(duties())
    assert [duty.name for duty in duties() if not duty.help.endswith(".")] == []


def test_each_is_granted() -> None:
    """Each needs something of tables that its part has, and a role of ours does it there; a retry is a part of it."""
    tables = {"producer": producer_tables("outbox").tables, "consumer": consumer_tables("outbox").tables}
    for part, there in tables.items():
        names = {table.rpartition(".")[2] for table in (*there, *common_tables("outbox").tables)} | {"op_sequence"}
        needed = {need.table for duty in duties() for each in duty.rights if each.part == part for need in each.needs}
        assert needed - names == set()
    granted = {role for duty in duties() for each in duty.rights for role in each.granted}
    assert granted == set(GRANT_ROLES)
    assert [duty.name for duty in duties() if not all(each.needs and each.granted for each in duty.rights)] == []
    assert [duty.name for duty in duties() if not duty.rights] == ["retry"]


class Given:
    """What an intake could take from."""

    name = "given"

    def take(self, *_: float) -> list[Received]:
        """Return nothing."""
        return []

    def confirm(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def test_each_is_planned_by_a_worker() -> None:
    """A worker of an application that declares everything has all tasks of all duties; each role has a duty."""
    pytest.importorskip("pyarrow", reason="a worker that reconciles needs it")
    outbox = Outbox(create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none"))
    outbox.consumer("t", group="g")(lambda message, session: None)
    outbox.checker("t")(lambda orphan: None)
    outbox.compensation("t")(lambda message, session: None)
    outbox.on_parked("t")(lambda letter, session: None)
    outbox.known_group("t", group="g")
    outbox.reconciliation(every=3600)
    outbox.every(60.0, topic="t", name="minutely")(lambda at: None)
    outbox.intake("t", source=Given())
    plan = Plan(outbox, check_roles(None), Clock(), producing=True, stopping=threading.Event())
    planned = {running.name for running in plan.duties}
    try:
        for duty in duties():
            if duty.tasks is not None:
                names = {task.name for task in duty.tasks(plan._post(outbox, duty))}
                assert names, duty.name
                assert names <= planned
    finally:
        plan.end()
    assert {duty.role for duty in duties() if duty.tasks or duty.name in OF_A_GROUP} - {None} == set(ROLES)
    assert {f"{name} t of g" for name in (*OF_A_GROUP, "prune")} | {"look for retries", "report"} <= planned


def test_what_parks_needs_what_a_send_needs_where_that_is_told() -> None:
    """A worker of a group with a callback for what it parks, and of no other, must be allowed to write the notices."""
    for told in (False, True):
        outbox = Outbox(create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none"))
        outbox.consumer("t", group="g", source="postgresql+psycopg://nobody@127.0.0.1:1/other")(lambda m, session: None)
        if told:
            outbox.on_parked("t")(lambda letter, session: None)
        plan = Plan(outbox, frozenset({"consume"}), Clock(), producing=False, stopping=threading.Event())
        assert ("send" in plan.needs[plan._own, "producer"]) is told
        assert plan.parts[plan._own] == ({"consumer", "producer"} if told else {"consumer"})
        plan.end()


def test_each_can_be_tried_by_users() -> None:
    """What calls functions of an application can be carried out in its tests."""
    passes = (ROOT / "outbox" / "testing" / "passes.py").read_text()
    calling = [duty.name for duty in duties() if duty.functions and duty.name not in TRIED]
    assert [name for name in calling if f'"{name}"' not in passes] == []
    declared = Outbox().__dict__
    assert [duty.functions for duty in duties() if duty.functions and duty.functions not in declared] == []


def test_each_is_documented() -> None:
    """The docs have a line for each, with the role of a worker and those of PostgreSQL; the command names the roles."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    missing = []
    for duty in duties():
        granted = ", ".join(role for role in GRANT_ROLES if any(role in each.granted for each in duty.rights))
        line = f"| {duty.name} | {duty.help} | {f'`{duty.role}`' if duty.role else ''} | {granted} |"
        missing += [] if line in page else [line]
    assert missing == [], "\n".join(missing)
    shown = re.sub(r"[\s│]+", " ", run_cli("run", "--help").out)
    assert ", ".join(ROLES) in shown
