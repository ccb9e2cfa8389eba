"""The pages of groups as a whole: how far each is, what holds it back, and the questions before an act on one.

And the topics whose dispatch is paused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Response

from outbox.console.api.lists import of_each
from outbox.console.context import requires
from outbox.console.pages.lists import FormPairs, listing_of, pairs_of, read
from outbox.console.pages.view import PageView, View
from outbox.errors import InvalidRequest
from outbox.operator.acts import (
    DELETE_GROUP,
    PAUSE_GROUP,
    PAUSE_TOPIC,
    RESET_GROUP,
    RESUME_GROUP,
    RESUME_TOPIC,
    SET_RATE,
    SKIP_GROUP,
    Declaration,
)
from outbox.operator.groups import GroupContents, GroupMove
from outbox.operator.health.overview import MOST_ROWS
from outbox.operator.operator import Operator
from outbox.reader import option

# A topic may have slashes: its routes say {topic:path}.
router: APIRouter = APIRouter(prefix="/groups", include_in_schema=False)

#: The acts by the last part of their addresses.
_ACTS = {"reset": RESET_GROUP, "skip": SKIP_GROUP, "delete": DELETE_GROUP}
#: Those that hold a group back, or let it go.
ControlWord = Literal["pause", "resume", "rate"]
_CONTROLS = {"pause": PAUSE_GROUP, "resume": RESUME_GROUP, "rate": SET_RATE}
TopicWord = Literal["pause", "resume"]
_TOPIC_CONTROLS = {"pause": PAUSE_TOPIC, "resume": RESUME_TOPIC}


@dataclass(frozen=True, slots=True)
class GroupForm:
    """What the form of an act on a group sends."""

    to: str | None = option(None, most=10_000)
    skip_pruned: bool = option(False)
    database: str | None = option(None, most=1000)
    source: str | None = option(None, most=1000)
    reason: str = option("", most=4000)

    @property
    def databases(self) -> dict[str, Any]:
        """Where the group and its producer are."""
        return {"database": self.database or None, "source": self.source or None}


@router.get("")
def groups(view: View) -> Response:
    """Show the groups, and the topics whose dispatch is paused."""
    pauses, unreached = of_each(view.operator, Operator.topic_pauses)
    found = listing_of(view, "groups", view.operator.groups(), unreached)
    shown: dict[str, Any] = {"pauses": pauses, "most": MOST_ROWS, "controls": _CONTROLS}
    return view.page("groups.html", found.status, list=found, acts=_ACTS, **shown)


def _question(
    view: View, act: str, group: str, topic: str, form: GroupForm, preview: GroupMove | GroupContents | None
) -> Response:
    shown: dict[str, Any] = {"group": group, "topic": topic, "form": form, "preview": preview}
    return view.page("group_act.html", act=_ACTS[act], word=act, **shown)


def _form(view: View) -> GroupForm:
    return read(GroupForm, pairs_of(view.request.url.query))


def _may(act: Declaration) -> dict[str, Any]:
    return {"dependencies": [requires(act.permission)]}


@router.get("/{group}/{topic:path}/reset", **_may(RESET_GROUP))
def confirm_reset(view: View, group: str, topic: str) -> Response:
    """Ask where the group goes on; then show what that would do, with the form that does it."""
    form = _form(view)
    preview = view.operator.preview_reset(group, topic, form.to, **form.databases) if form.to else None
    return _question(view, "reset", group, topic, form, preview)


@router.post("/{group}/{topic:path}/reset", **_may(RESET_GROUP))
def reset(view: View, group: str, topic: str, pairs: FormPairs) -> Response:
    """Have the group read again."""
    form = read(GroupForm, pairs)
    more: dict[str, Any] = {"skip_pruned": form.skip_pruned, **form.databases}
    view.operator.reset_group(group, topic, form.to or "", by=view.context.actor, why=form.reason, **more)
    return view.done(RESET_GROUP.name, "groups")


@router.get("/{group}/{topic:path}/skip", **_may(SKIP_GROUP))
def confirm_skip(view: View, group: str, topic: str) -> Response:
    """Ask up to where the group skips; then show what that would do, with the form that does it."""
    form = _form(view)
    preview = view.operator.preview_skip(group, topic, form.to, **form.databases) if form.to else None
    return _question(view, "skip", group, topic, form, preview)


@router.post("/{group}/{topic:path}/skip", **_may(SKIP_GROUP))
def skip(view: View, group: str, topic: str, pairs: FormPairs) -> Response:
    """Have the group skip."""
    form = read(GroupForm, pairs)
    view.operator.skip_group(group, topic, form.to or "", by=view.context.actor, why=form.reason, **form.databases)
    return view.done(SKIP_GROUP.name, "groups")


@router.get("/{group}/{topic:path}/delete", **_may(DELETE_GROUP))
def confirm_delete(view: View, group: str, topic: str) -> Response:
    """Show what is deleted with the group, with the form that does it."""
    form = _form(view)
    preview = view.operator.preview_delete(group, topic, database=form.database)
    return _question(view, "delete", group, topic, form, preview)


@router.post("/{group}/{topic:path}/delete", **_may(DELETE_GROUP))
def delete(view: View, group: str, topic: str, pairs: FormPairs) -> Response:
    """Delete the group."""
    form = read(GroupForm, pairs)
    view.operator.delete_group(group, topic, by=view.context.actor, why=form.reason, database=form.database)
    return view.done(DELETE_GROUP.name, "groups")


# --- held back -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ControlForm:
    """What the form before an act on a group sends; an empty rate is as the handler declares."""

    rate: str | None = option(None, most=40)
    reason: str = option("", most=4000)
    database: str | None = option(None)


@router.get("/{group}/{topic:path}/{act}", **_may(PAUSE_GROUP))
def confirm_control(view: View, group: str, topic: str, act: ControlWord, database: str | None = None) -> Response:
    """Show the form that acts on a group."""
    return _ask(view, group, topic, act, ControlForm(database=database))


@router.post("/{group}/{topic:path}/{act}", **_may(PAUSE_GROUP))
def control(view: View, group: str, topic: str, act: ControlWord, pairs: FormPairs) -> Response:
    """Act on a group."""
    form = read(ControlForm, pairs)
    operator, by = view.operator, view.context.actor
    where = {"topic": topic, "database": form.database}
    try:
        if act == "rate":
            operator.set_rate(group, form.rate or None, by=by, why=form.reason, **where)
        else:
            perform = operator.pause_group if act == "pause" else operator.resume_group
            perform(group, by=by, why=form.reason, **where)
    except InvalidRequest as error:
        if error.field != "rate":
            raise
        return _ask(view, group, topic, act, form, fault=str(error))
    return view.done(_CONTROLS[act].name, "groups")


def _ask(
    view: PageView, group: str, topic: str, act: ControlWord, form: ControlForm, *, fault: str | None = None
) -> Response:
    found = view.operator.control_of(group, topic, form.database)
    shown = {"control": found, "act": _CONTROLS[act], "word": act, "form": form, "fault": fault}
    return view.page("group_control.html", 422 if fault else 200, **shown)


@dataclass(frozen=True, slots=True)
class TopicForm:
    """What the form before an act on a topic sends."""

    topic: str = option("", most=1000)
    reason: str = option("", most=4000)
    database: str | None = option(None)
    create: bool = option(False)


@router.get("/topic/{act}", **_may(PAUSE_TOPIC))
def confirm_topic(view: View, act: TopicWord, topic: str = "", database: str | None = None) -> Response:
    """Show the form that pauses a topic, or resumes it."""
    return view.page("topic_control.html", act=_TOPIC_CONTROLS[act], word=act, topic=topic, database=database)


@router.post("/topic/{act}", **_may(PAUSE_TOPIC))
def control_topic(view: View, act: TopicWord, pairs: FormPairs) -> Response:
    """Pause a topic, or resume it."""
    form, operator = read(TopicForm, pairs), view.operator
    perform = partial(operator.pause_topic, create=form.create) if act == "pause" else operator.resume_topic
    perform(form.topic, by=view.context.actor, why=form.reason, database=form.database)
    return view.done(_TOPIC_CONTROLS[act].name, "groups")
