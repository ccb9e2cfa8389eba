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
)
from outbox.operator.groups import GroupContents, GroupMove
from outbox.operator.health.overview import MOST_ROWS
from outbox.operator.operator import Operator
from outbox.reader import option

# A topic may have slashes: its routes say {topic:path}.
router: APIRouter = APIRouter(prefix="/groups", include_in_schema=False)

#: The acts by the last part of their addresses: previewed ones, and those that hold a group back or let it go.
_ACTS = {"reset": RESET_GROUP, "skip": SKIP_GROUP, "delete": DELETE_GROUP}
_CONTROLS = {"pause": PAUSE_GROUP, "resume": RESUME_GROUP, "rate": SET_RATE}
GroupWord = Literal["reset", "skip", "delete", "pause", "resume", "rate"]
TopicWord = Literal["pause", "resume"]
_TOPIC_CONTROLS = {"pause": PAUSE_TOPIC, "resume": RESUME_TOPIC}
#: What each act takes of the form, beside the reason.
_TAKES = dict.fromkeys(("delete", "pause", "resume"), ("database",)) | {
    "rate": ("rate", "database"),
    "skip": ("to", "database", "source"),
    "reset": ("to", "skip_pruned", "database", "source"),
}


@dataclass(frozen=True, slots=True)
class GroupForm:
    """Take the form of an act on a group; no rate is as the handler declares."""

    to: str = option("", most=10_000)
    skip_pruned: bool = option(False)
    rate: str | None = option(None, most=40)
    database: str | None = option(None, most=1000)
    source: str | None = option(None, most=1000)
    reason: str = option("", most=4000)


@router.get("")
def groups(view: View) -> Response:
    """Show the groups, and the topics whose dispatch is paused."""
    pauses, unreached = of_each(view.operator, Operator.topic_pauses)
    found = listing_of(view, "groups", view.operator.groups(), unreached)
    shown: dict[str, Any] = {"pauses": pauses, "most": MOST_ROWS, "controls": _CONTROLS}
    return view.page("groups.html", found.status, list=found, acts=_ACTS, **shown)


@router.get("/{group}/{topic:path}/{act}")
def confirm(view: View, group: str, topic: str, act: GroupWord) -> Response:
    """Show what an act on a group would do, with the form that does it; ask first where the group is to go on."""
    return _ask(view, group, topic, act, read(GroupForm, pairs_of(view.request.url.query)))


@router.post("/{group}/{topic:path}/{act}")
def do(view: View, group: str, topic: str, act: GroupWord, pairs: FormPairs) -> Response:
    """Act on a group."""
    chosen, form = (_ACTS | _CONTROLS)[act], read(GroupForm, pairs)
    view.context.demand(chosen.permission)
    values = {name: getattr(form, name) for name in _TAKES[act]}
    try:
        getattr(view.operator, chosen.name)(group, topic=topic, by=view.context.actor, why=form.reason, **values)
    except InvalidRequest as error:
        if error.field != "rate":
            raise
        return _ask(view, group, topic, act, form, fault=str(error))
    return view.done(chosen.name, "groups")


def _ask(view: PageView, group: str, topic: str, word: str, form: GroupForm, *, fault: str | None = None) -> Response:
    operator, act = view.operator, (_ACTS | _CONTROLS)[word]
    view.context.demand(act.permission)
    shown: dict[str, Any] = {"act": act, "word": word, "form": form, "fault": fault}
    if word in _CONTROLS:
        control = operator.control_of(group, topic, form.database)
        return view.page("group_control.html", 422 if fault else 200, control=control, **shown)
    preview: GroupMove | GroupContents | None = None
    if word == "delete":
        preview = operator.preview_delete(group, topic, database=form.database)
    elif form.to:
        perform = operator.preview_reset if word == "reset" else operator.preview_skip
        preview = perform(group, topic, form.to, database=form.database, source=form.source)
    return view.page("group_act.html", group=group, topic=topic, preview=preview, **shown)


@dataclass(frozen=True, slots=True)
class TopicForm:
    """Take the form before an act on a topic."""

    topic: str = option("", most=1000)
    reason: str = option("", most=4000)
    database: str | None = option(None)
    create: bool = option(False)


@router.get("/topic/{act}", dependencies=[requires(PAUSE_TOPIC.permission)])
def confirm_topic(view: View, act: TopicWord, topic: str = "", database: str | None = None) -> Response:
    """Show the form that pauses a topic, or resumes it."""
    return view.page("topic_control.html", act=_TOPIC_CONTROLS[act], word=act, topic=topic, database=database)


@router.post("/topic/{act}", dependencies=[requires(PAUSE_TOPIC.permission)])
def control_topic(view: View, act: TopicWord, pairs: FormPairs) -> Response:
    """Pause a topic, or resume it."""
    form, operator = read(TopicForm, pairs), view.operator
    perform = partial(operator.pause_topic, create=form.create) if act == "pause" else operator.resume_topic
    perform(form.topic, by=view.context.actor, why=form.reason, database=form.database)
    return view.done(_TOPIC_CONTROLS[act].name, "groups")
