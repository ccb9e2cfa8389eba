"""Endpoints of groups and topics as a whole: the groups, what an act on one would do, and the acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path

from outbox.console.api.acts import GroupName, ReasonBody
from outbox.console.api.lists import KEYS, of_each
from outbox.console.api.requests import PageQuery, from_body, from_query, problems
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
from outbox.operator.groups import GroupContents, GroupMove, GroupRow
from outbox.operator.look.paging import listed
from outbox.operator.model import Page, PageRequest
from outbox.operator.operator import Operator
from outbox.operator.topic_control import TopicPause
from outbox.operator.topics import TopicContents
from outbox.reader import option

router: APIRouter = APIRouter(prefix=f"{API}/groups", responses=problems(), tags=["groups"])
topics: APIRouter = APIRouter(prefix=f"{API}/topics", responses=problems(), tags=["topics"])

# A topic may have slashes: its routes say {topic:path}.
TopicName = Annotated[str, Path(max_length=MAX_TOPIC, pattern=TOPIC_PATTERN, description="Which topic it consumes.")]
_TO = "first, now, a position, QUEUE:POSITION,…, a time in ISO 8601, or how long ago: 3d."


@dataclass(frozen=True, kw_only=True)
class GroupDatabases:
    """In which databases a group and its producer are."""

    database: str | None = option(None, "The group's database, where several know it.", most=1000)
    source: str | None = option(None, "The producer's database, where several have the topic.", most=1000)

    @property
    def values(self) -> dict[str, Any]:
        """The arguments of the operator's methods."""
        return {"database": self.database, "source": self.source}


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
class GroupDeleteBody(ReasonBody):
    """Why a group is deleted."""

    database: str | None = option(None, "The group's database, where several know it.", most=1000)


@dataclass(frozen=True, kw_only=True)
class TopicControlBody(ReasonBody, TopicDatabase):
    """Why a topic is paused or resumed."""


@dataclass(frozen=True, kw_only=True)
class TopicPauseBody(TopicControlBody):
    """Why a topic is paused."""

    create: bool = option(False, "Also a topic that has no message so far.")


@dataclass(frozen=True, kw_only=True)
class GroupControlBody(ReasonBody):
    """Why a group is held back or let go, and what of it."""

    topic: str | None = option(None, "Only what the group consumes of this topic.", most=1000)
    database: str | None = option(None, "The group's database, where several know it.", most=1000)


@dataclass(frozen=True, kw_only=True)
class GroupRateBody(GroupControlBody):
    """How fast a group may be, and why."""

    rate: str | None = option(None, "Such as 100/s, 30/min or 5/h; none: as its handler declares.", most=40)


@dataclass(frozen=True, slots=True)
class WholeActed:
    """What was done, in a sentence."""

    outcome: str


def _of(act: Declaration) -> dict[str, Any]:
    """Return how the endpoint of an act is declared."""
    return {
        "summary": act.summary,
        "description": f"{act.details}\n\nAn example of a reason: {act.why}.",
        "dependencies": [requires(act.permission)],
        "responses": problems(404, 409, 415),
    }


def _preview_of(act: Declaration) -> dict[str, Any]:
    """Return how the preview of an act is declared: it counts for long, so that it needs what the act needs."""
    return {"dependencies": [requires(act.permission)], "responses": problems(404)}


@router.get("")
def groups(context: Context, page: PageRequest = from_query(PageQuery)) -> Page[GroupRow]:
    """Return a page of the groups: how far each is behind, who consumes for it, and how operators moved it."""
    _, unreached = of_each(context.operator, Operator.topic_pauses)
    return listed(context.operator.groups(), page, KEYS["groups"], unreached)


def _held(context: Context, body: GroupControlBody) -> dict[str, Any]:
    return {"by": context.actor, "why": body.reason, "topic": body.topic, "database": body.database}


@router.post("/{group}/pause", **_of(PAUSE_GROUP))
def pause_group(context: Context, group: GroupName, body: GroupControlBody = from_body(GroupControlBody)) -> WholeActed:
    """Pause a group."""
    return WholeActed(context.operator.pause_group(group, **_held(context, body)))


@router.post("/{group}/resume", **_of(RESUME_GROUP))
def resume_group(
    context: Context, group: GroupName, body: GroupControlBody = from_body(GroupControlBody)
) -> WholeActed:
    """Have a group go on."""
    return WholeActed(context.operator.resume_group(group, **_held(context, body)))


@router.post("/{group}/rate", **_of(SET_RATE))
def set_rate(context: Context, group: GroupName, body: GroupRateBody = from_body(GroupRateBody)) -> WholeActed:
    """Slow a group down."""
    return WholeActed(context.operator.set_rate(group, body.rate, **_held(context, body)))


@router.get("/{group}/{topic:path}/reset", **_preview_of(RESET_GROUP))
def preview_group_reset(
    context: Context, group: GroupName, topic: TopicName, query: StartQuery = from_query(StartQuery)
) -> GroupMove:
    """Return what a reset would do."""
    return context.operator.preview_reset(group, topic, query.to, **query.values)


@router.post("/{group}/{topic:path}/reset", **_of(RESET_GROUP))
def reset_group(
    context: Context, group: GroupName, topic: TopicName, body: GroupResetBody = from_body(GroupResetBody)
) -> WholeActed:
    """Have a group read again."""
    start, more = body.to, {"skip_pruned": body.skip_pruned, **body.values}
    return WholeActed(context.operator.reset_group(group, topic, start, by=context.actor, why=body.reason, **more))


@router.get("/{group}/{topic:path}/skip", **_preview_of(SKIP_GROUP))
def preview_group_skip(
    context: Context, group: GroupName, topic: TopicName, query: StartQuery = from_query(StartQuery)
) -> GroupMove:
    """Return what a skip would do."""
    return context.operator.preview_skip(group, topic, query.to, **query.values)


@router.post("/{group}/{topic:path}/skip", **_of(SKIP_GROUP))
def skip_group(
    context: Context, group: GroupName, topic: TopicName, body: GroupSkipBody = from_body(GroupSkipBody)
) -> WholeActed:
    """Have a group skip a backlog."""
    start = body.to
    return WholeActed(
        context.operator.skip_group(group, topic, start, by=context.actor, why=body.reason, **body.values)
    )


@router.get("/{group}/{topic:path}/delete", **_preview_of(DELETE_GROUP))
def preview_group_delete(
    context: Context, group: GroupName, topic: TopicName, query: GroupDatabases = from_query(GroupDatabases)
) -> GroupContents:
    """Return what would be deleted with a group."""
    return context.operator.preview_delete(group, topic, database=query.database)


@router.post("/{group}/{topic:path}/delete", **_of(DELETE_GROUP))
def delete_group(
    context: Context, group: GroupName, topic: TopicName, body: GroupDeleteBody = from_body(GroupDeleteBody)
) -> WholeActed:
    """Delete a group that is gone."""
    return WholeActed(
        context.operator.delete_group(group, topic, by=context.actor, why=body.reason, database=body.database)
    )


@topics.get("/{topic:path}/delete", **_preview_of(DELETE_TOPIC))
def preview_topic_delete(
    context: Context, topic: TopicName, query: TopicDatabase = from_query(TopicDatabase)
) -> TopicContents:
    """Return what there is of a topic, and what speaks against its deletion."""
    return context.operator.preview_delete_topic(topic, database=query.database)


@topics.post("/{topic:path}/delete", **_of(DELETE_TOPIC))
def delete_topic(context: Context, topic: TopicName, body: TopicDeleteBody = from_body(TopicDeleteBody)) -> WholeActed:
    """Delete a topic that is gone."""
    return WholeActed(context.operator.delete_topic(topic, by=context.actor, why=body.reason, database=body.database))


@topics.get("/paused")
def paused_topics(context: Context, page: PageRequest = from_query(PageQuery)) -> Page[TopicPause]:
    """Return a page of the topics whose dispatch is paused, and how many messages each holds."""
    rows, unreached = of_each(context.operator, Operator.topic_pauses)
    return listed(rows, page, KEYS["topic_pauses"], unreached)


@topics.post("/{topic:path}/pause", **_of(PAUSE_TOPIC))
def pause_topic(context: Context, topic: TopicName, body: TopicPauseBody = from_body(TopicPauseBody)) -> WholeActed:
    """Pause the dispatch of a topic."""
    facts: dict[str, Any] = {"by": context.actor, "why": body.reason, "database": body.database, "create": body.create}
    return WholeActed(context.operator.pause_topic(topic, **facts))


@topics.post("/{topic:path}/resume", **_of(RESUME_TOPIC))
def resume_topic(
    context: Context, topic: TopicName, body: TopicControlBody = from_body(TopicControlBody)
) -> WholeActed:
    """Have the dispatch of a topic go on."""
    facts: dict[str, Any] = {"by": context.actor, "why": body.reason, "database": body.database}
    return WholeActed(context.operator.resume_topic(topic, **facts))
