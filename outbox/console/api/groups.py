"""Endpoints of the acts on groups and topics as a whole, and of what each would do."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any

from fastapi import APIRouter, Path

from outbox.console.api.acts import ActSentence, GroupName, ReasonBody, declared
from outbox.console.api.requests import from_body, from_query, problems
from outbox.console.context import API, Context, requires
from outbox.message.content import MAX_TOPIC, TOPIC_PATTERN
from outbox.operator.acts import (
    DELETE_GROUP,
    DELETE_TOPIC,
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
from outbox.operator.topics import TopicContents
from outbox.reader import option

router: APIRouter = APIRouter(prefix=f"{API}/groups", responses=problems(), tags=["groups"])
topics: APIRouter = APIRouter(prefix=f"{API}/topics", responses=problems(), tags=["topics"])

# A topic may have slashes: its routes say {topic:path}.
TopicName = Annotated[str, Path(max_length=MAX_TOPIC, pattern=TOPIC_PATTERN, description="Which topic it consumes.")]
_TO = "first, now, a position, QUEUE:POSITION,…, a time in ISO 8601, or how long ago: 3d."


@dataclass(frozen=True, kw_only=True)
class GroupDatabase:
    """In which database a group is."""

    database: str | None = option(None, "The group's database, where several know it.", most=1000)


@dataclass(frozen=True, kw_only=True)
class GroupDatabases(GroupDatabase):
    """In which databases a group and its producer are."""

    source: str | None = option(None, "The producer's database, where several have the topic.", most=1000)


@dataclass(frozen=True, kw_only=True)
class TopicDatabase:
    """In which database a topic is."""

    database: str | None = option(None, "The producer's database, where several have it.", most=1000)


@dataclass(frozen=True, kw_only=True)
class TopicDeleteBody(ReasonBody, TopicDatabase):
    """Why a topic is deleted."""


@dataclass(frozen=True, kw_only=True)
class StartQuery(GroupDatabases):
    """Where the group would go on."""

    to: str = option("now", _TO, most=10_000)


@dataclass(frozen=True, kw_only=True)
class GroupResetBody(ReasonBody, GroupDatabases):
    """Where the group goes on, and why."""

    to: str = option(help=_TO, most=10_000)
    skip_pruned: bool = option(False, "Accept that some of it was pruned.")


@dataclass(frozen=True, kw_only=True)
class GroupSkipBody(ReasonBody, StartQuery):
    """Where the group goes on, and why."""


@dataclass(frozen=True, kw_only=True)
class GroupDeleteBody(ReasonBody, GroupDatabase):
    """Why a group is deleted."""


@dataclass(frozen=True, kw_only=True)
class TopicControlBody(ReasonBody, TopicDatabase):
    """Why a topic is paused or resumed."""


@dataclass(frozen=True, kw_only=True)
class TopicPauseBody(TopicControlBody):
    """Why a topic is paused."""

    create: bool = option(False, "Also a topic that has no message so far.")


@dataclass(frozen=True, kw_only=True)
class GroupControlBody(ReasonBody, GroupDatabase):
    """Why a group is held back or let go, and what of it."""

    topic: str | None = option(None, "Only what the group consumes of this topic.", most=1000)


@dataclass(frozen=True, kw_only=True)
class GroupRateBody(GroupControlBody):
    """How fast a group may be, and why."""

    rate: str | None = option(None, "Such as 100/s, 30/min or 5/h; none: as its handler declares.", most=40)


# --- acts, and what each would do: the operator's calls, which take what the path and the fields have --------------


def _add(path: str, call: str, parameter: Any, returned: type, **more: Any) -> None:
    def endpoint(context: Context, fields: Any, **names: str) -> Any:
        values = names | asdict(fields)
        if "reason" in values:
            values |= {"by": context.actor, "why": values.pop("reason")}
        found = getattr(context.operator, call)(**values)
        return ActSentence(found) if returned is ActSentence else found

    hints: dict[str, Any] = {"context": Context} | {name: _NAMES[name] for name in re.findall(r"\{(\w+)", path)}
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY, annotation=hint) for name, hint in hints.items()]
    parameters.append(Parameter("fields", Parameter.KEYWORD_ONLY, annotation=Any, default=parameter))
    endpoint.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # what FastAPI reads
    (router if "{group}" in path else topics).add_api_route(path, endpoint, response_model=returned, **more)


def _add_act(act: Declaration, path: str, body: type) -> None:
    _add(path, act.name, from_body(body), ActSentence, methods=["POST"], name=act.name, **declared(act, 404, 409, 415))


def _add_preview(act: Declaration, path: str, call: str, query: type, returned: type, description: str) -> None:
    word, whole = act.name.split("_")
    # It counts for long, so that it needs what the act needs.
    more: dict[str, Any] = {"dependencies": [requires(act.permission)], "responses": problems(404)}
    name = f"preview_{whole}_{word}"
    _add(path, call, from_query(query), returned, name=name, description=description, **more)


_NAMES: dict[str, Any] = {"group": GroupName, "topic": TopicName}
_RESET, _SKIP, _DELETE = (f"/{{group}}/{{topic:path}}/{word}" for word in ("reset", "skip", "delete"))
_DELETE_TOPIC = "/{topic:path}/delete"

_add_act(PAUSE_GROUP, "/{group}/pause", GroupControlBody)
_add_act(RESUME_GROUP, "/{group}/resume", GroupControlBody)
_add_act(SET_RATE, "/{group}/rate", GroupRateBody)
_add_preview(RESET_GROUP, _RESET, "preview_reset", StartQuery, GroupMove, "Return what a reset would do.")
_add_act(RESET_GROUP, _RESET, GroupResetBody)
_add_preview(SKIP_GROUP, _SKIP, "preview_skip", StartQuery, GroupMove, "Return what a skip would do.")
_add_act(SKIP_GROUP, _SKIP, GroupSkipBody)
_WITH_GROUP = "Return what would be deleted with a group."
_add_preview(DELETE_GROUP, _DELETE, "preview_delete", GroupDatabase, GroupContents, _WITH_GROUP)
_add_act(DELETE_GROUP, _DELETE, GroupDeleteBody)
_OF_TOPIC = "Return what there is of a topic, and what speaks against its deletion."
_add_preview(DELETE_TOPIC, _DELETE_TOPIC, "preview_delete_topic", TopicDatabase, TopicContents, _OF_TOPIC)
_add_act(DELETE_TOPIC, _DELETE_TOPIC, TopicDeleteBody)
_add_act(PAUSE_TOPIC, "/{topic:path}/pause", TopicPauseBody)
_add_act(RESUME_TOPIC, "/{topic:path}/resume", TopicControlBody)
