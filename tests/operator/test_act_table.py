"""The table of acts: each row is whole, and everything that is made of the table has the table's words."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from fastapi.routing import APIRoute
from typer.main import get_command

import outbox
from outbox.acts import whole_acts as rows
from outbox.acts.changes import FEW, STATES, Act, Target
from outbox.acts.messages import ACTS, act_named, acts_for
from outbox.acts.whole_acts import AUDITED, WHOLE_ACTS, WholeAct, form_of
from outbox.cli import app
from outbox.console.api import acts
from outbox.console.context import Role
from outbox.console.pages import acts as pages
from outbox.errors import InvalidRequest
from outbox.operator.model import Selector
from outbox.operator.operator import Operator
from tests.operator.acting import ANN, Desk

#: The names by which rows can be imported.
DECLARED = {name for name, value in vars(rows).items() if isinstance(value, WholeAct)}
EVERY = pytest.mark.parametrize("act", ACTS.values(), ids=list(ACTS))


@EVERY
def test_a_row_is_whole(act: Act) -> None:
    """Each state has a mend or needs none, each text is a text, and the permission is one that its role has."""
    assert act.from_states
    assert STATES.keys() >= act.from_states | act.mends.keys()
    assert not act.from_states & act.mends.keys()
    assert (act.change is None) == act.as_job
    for text in (act.summary, act.details, act.why, act.label, act.consequence, act.happened, act.participle):
        assert text == text.strip() != ""
    assert act.permission in Role(act.role).permissions
    if act.role == "admin":
        assert act.permission not in Role.OPERATOR.permissions


@EVERY
def test_a_method_of_the_operator(act: Act) -> None:
    """Each act has a method of its name, which takes ids first, and says who and why; a group in an inbox."""
    parameters = inspect.signature(getattr(Operator, act.name)).parameters
    assert list(parameters)[1] == "message_ids"
    assert {"by", "why", *(option.name for option in act.options)} <= parameters.keys()
    assert ("group" in parameters) == (act.noun == "inbox")
    assert (parameters["why"].default is inspect.Parameter.empty) == act.needs_reason


@pytest.mark.parametrize("act", WHOLE_ACTS.values(), ids=list(WHOLE_ACTS))
def test_a_row_of_what_is_no_message(act: WholeAct) -> None:
    """The operator's methods take what the row asks for; each way in has the act, made of the row."""
    known = {field.name for field in fields(form_of(act))}
    part = acts.part_of(act)
    assert {*act.taken(part, act.method or act.name)} - {"idempotency_key"} == known | {"by", "why"}
    for method in filter(None, (act.preview, act.current)):
        assert {*act.taken(part, method)} <= known | {"by"}
    for text in (act.summary, act.details, act.consequence, act.happened, act.button, act.target, act.example):
        assert text == text.strip() != ""
    assert act.permission in Role(act.role).permissions
    values = {field.name: field.name for field in fields(form_of(act))}
    assert act.names[0] in act.named(values)
    assert bool(act.to_type(values)) == (act.grave and not act.names[0].endswith(("_id", "command")))
    assert act.to_type(values, SimpleNamespace(reach=FEW)) == ""
    assert act.to_type(values, SimpleNamespace(reach=FEW + 1)) == act.to_type(values)
    endpoints, shown = (
        {
            (route.path, method)
            for route in router.routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }
        for router in (acts.whole_acts, pages.router)
    )
    assert (f"/api/v1{act.path}", "POST") in endpoints
    assert ((f"/api/v1{act.path}", "GET") in endpoints) == bool(act.preview)
    asked = (f"/acts/{act.name}/ask", "POST") if act.secret else (f"/acts/{act.name}", "GET")
    assert {asked, (f"/acts/{act.name}", "POST")} <= shown
    assert act.secret == ((f"/acts/{act.name}", "GET") not in shown)
    commands: Any = get_command(app)
    commands = commands.commands[act.noun].commands
    assert act.summary in commands[act.word].help
    assert {each.name.rpartition("_")[2] for each in commands[act.word].params} >= {act.names[0].rpartition("_")[2]}


def _by_name(tree: ast.AST) -> Iterator[str]:
    """Yield the acts that a module imports, or takes out of a table, by name."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="outbox.acts.messages" | "outbox.acts.whole_acts"):
                yield from (each.name for each in node.names if each.name in DECLARED)
            case ast.Subscript(ast.Name("ACTS" | "WHOLE_ACTS"), ast.Constant(str(name))):
                yield name


def test_no_way_in_names_an_act() -> None:
    """Console and commands are made of the tables: none of their modules imports one act, or takes it out by name.

    Two are more than their row: the check by the checker of this process, and the alias that rolls back or compensates.
    """
    package = Path(outbox.__file__).parent
    found = {
        path.relative_to(package).as_posix(): names
        for folder in ("console", "cli")
        for path in (package / folder).rglob("*.py")
        if (names := sorted(_by_name(ast.parse(path.read_text("utf-8")))))
    }
    assert found == {"cli/messages.py": ["check"], "console/api/acts.py": ["rollback"]}


def test_every_act_is_of_one_noun() -> None:
    """The nouns share the acts out among them, in the order of the table."""
    assert [act.name for noun in ("message", "half", "inbox") for act in acts_for(noun)] == list(ACTS)
    with pytest.raises(InvalidRequest, match="action 'abort' must be one of: resend, "):
        act_named("abort")


@pytest.mark.parametrize("name", ["purge", "", None, [], 7])
def test_an_act_that_there_is_not(desk: Desk, name: Any) -> None:
    """By whichever way it is asked for: the error names it, and those that there are."""
    operator, selector = desk.operator, Selector(targets=(Target(desk.half("undecided")),))
    for ask in (
        lambda: operator.act(name, Target(desk.half("undecided")), by=ANN),
        lambda: operator.preview(name, selector),
        lambda: operator.start(name, selector, by=ANN, why="so"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(f"{name!r} must be one of: resend, recall")):
            ask()


def test_the_audit_has_the_words_of_the_table(desk: Desk) -> None:
    """What the audit's list offers to search for is what is stored there."""
    done = {
        "resend": ("dispatched", None), "recall": ("scheduled", None), "check": ("undecided", None),
        "reset": ("undecided", None), "commit": ("undecided", None), "rollback": ("undecided", None),
        "retry": ("parked", "bank-b"), "park": ("failed", "bank-b"), "discard": ("parked", "bank-b"),
        "restore": ("discarded", "bank-b"),
    }  # fmt: skip
    assert done.keys() == ACTS.keys() - {"compensate"}
    for name, (state, group) in done.items():
        desk.act(name, desk.inbox(state)[0] if group else desk.half(state), group)
    job = desk.start("compensate", desk.half("committed"))
    desk.operator.cancel(job.id, by=ANN)
    desk.operator.message(desk.half("dispatched"), reveal=ANN)
    stored = set(desk.rows("SELECT DISTINCT action FROM outbox.audit"))
    assert stored == {*done, "bulk", "reveal"}
    assert stored < set(AUDITED)


@pytest.mark.parametrize(("name", "state"), [("resend", "dispatched"), ("rollback", "undecided"), ("retry", "parked")])
def test_an_act_walks_through_few_modules(desk: Desk, name: str, state: str) -> None:
    """From the operator's call to the last statement, a reader opens eleven modules of the package at most."""
    group = "bank-b" if ACTS[name].noun == "inbox" else None
    message_id = desk.inbox(state)[0] if group else desk.half(state)
    operator, modules = desk.operator, set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("outbox."):
            modules.add(module)

    sys.setprofile(note)
    try:
        operator.act(name, Target(message_id, group), by=ANN, why="because")
    finally:
        sys.setprofile(None)
    assert len(modules) <= 11, sorted(modules)
