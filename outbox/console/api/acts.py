"""Endpoints that do one thing to one message; those on an inbox are in `inbox`.

The bodies of acts and orders. Unknown fields are refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Response
from pydantic import Field

from outbox.console.api.answers import Acted, problems
from outbox.console.api.fields import (
    PREFIX,
    ActName,
    Halves,
    IfMatch,
    Inbox,
    Messages,
    Reason,
    Strict,
    Text,
    Token,
    etag,
    expected_version,
)
from outbox.console.context import Context, RequestContext, requires
from outbox.errors import InvalidRequest
from outbox.operator.acts import ACTS
from outbox.operator.model import MAX_IDS, Selector, Target

Group = Annotated[str, Path(max_length=120, pattern=r"^[%|a-zA-Z0-9_-]+$")]

router = APIRouter(prefix=PREFIX, responses=problems())


class Act(Strict):
    """One act. ``force`` is for ``commit`` of a half that carries a fence."""

    reason: Reason = ""
    force: bool = False
    database: Text | None = None

    def options(self) -> dict[str, Any]:
        """Return the options as the service layer takes them."""
        return {"force": True} if self.force else {}


class Why(Strict):
    """Why something is done."""

    reason: Reason = ""


class CompensationPreview(Strict):
    """What a compensation of one message would do."""

    acknowledge_delivered: bool = False
    database: Text | None = None

    def options(self) -> dict[str, Any]:
        """Return the options as the service layer takes them."""
        return {"acknowledge_delivered": True} if self.acknowledge_delivered else {}


class CompensationOrder(CompensationPreview):
    """A compensation of one message; ``token`` is that of its preview."""

    reason: Reason = ""
    token: Token | None = None


class Ids(Strict):
    """Messages by their ids, in one bulk job."""

    ids: Annotated[list[UUID], Field(min_length=1, max_length=MAX_IDS)]
    reason: Reason = ""
    database: Text | None = None
    rate: Annotated[float, Field(gt=0, le=1e6)] | None = None

    def selector(self) -> Selector:
        """Return the messages as the service layer takes them."""
        return Selector(targets=tuple(Target(each) for each in self.ids))


class Named(Strict):
    """One message, of a group where the act is on an inbox."""

    message_id: UUID
    group: Text | None = None


class Selected(Strict):
    """What a bulk job acts on: exactly one of ``ids`` (of a ``group``), ``targets`` and the filters."""

    ids: Annotated[list[UUID], Field(max_length=MAX_IDS)] | None = None
    group: Text | None = None
    targets: Annotated[list[Named], Field(max_length=MAX_IDS)] | None = None
    messages: Messages | None = None
    inbox: Inbox | None = None
    halves: Halves | None = None

    def selector(self) -> Selector:
        """Return the selection as the service layer takes it.

        Raises:
            InvalidRequest: not exactly one of them is given, or a group without ids.
        """
        given = [name for name in ("ids", "targets", "messages", "inbox", "halves") if getattr(self, name) is not None]
        if len(given) != 1:
            said = f"it has {', '.join(given)}" if given else "it has none"
            raise InvalidRequest(f"a selector has one of ids, targets, messages, inbox and halves; {said}", "selector")
        if self.group is not None and self.ids is None:
            raise InvalidRequest("group goes with ids; a filter or target has a group of its own", "selector.group")
        named = [Target(each, self.group) for each in self.ids or []]
        named += [Target(each.message_id, each.group) for each in self.targets or []]
        return Selector(
            targets=tuple(named) if self.ids is not None or self.targets is not None else None,
            messages=self.messages.filter() if self.messages else None,
            inbox=self.inbox.filter() if self.inbox else None,
            halves=self.halves.filter() if self.halves else None,
        )


class Options(Strict):
    """What a bulk job is told beside: ``force`` for ``commit``, ``acknowledge_delivered`` for ``compensate``."""

    force: bool = False
    acknowledge_delivered: bool = False

    def chosen(self) -> dict[str, Any]:
        """Return those that are set."""
        return {name: True for name, value in self if value}


class BulkJobPreview(Strict):
    """What a bulk job would do."""

    action: ActName
    selector: Selected
    database: Text | None = None
    options: Options = Options()


class Order(BulkJobPreview):
    """A bulk job; ``token`` is that of its preview, ``rate`` how many items a second at most."""

    reason: Reason = ""
    token: Token | None = None
    rate: Annotated[float, Field(gt=0, le=1e6)] | None = None


def _act(action: str) -> Callable[..., Acted]:
    def act(context: Context, message_id: UUID, body: Act, response: Response, if_match: IfMatch = None) -> Acted:
        return _do(context, action, Target(message_id), body, response, if_match)

    def act_in_group(
        context: Context, group: Group, message_id: UUID, body: Act, response: Response, if_match: IfMatch = None
    ) -> Acted:
        return _do(context, action, Target(message_id, group), body, response, if_match)

    return act_in_group if ACTS[action].part == "consumer" else act


def _do(
    context: RequestContext, action: str, target: Target, body: Act, response: Response, if_match: str | None
) -> Acted:
    """Do one thing to one message, and return what came of it with the message as it is now."""
    outcome = context.admin.act(
        action,
        target,
        by=context.actor,
        why=body.reason,
        options=body.options(),
        version=expected_version(if_match),
        database=body.database,
    )
    view = context.admin.message(target.message_id)
    response.headers["ETag"] = etag(view.version)
    return Acted(outcome, view)


for _name, _row in ACTS.items():
    if not _row.as_job:
        router.add_api_route(
            f"/inbox/{{group}}/{{message_id}}/{_name}" if _row.noun == "inbox" else f"/messages/{{message_id}}/{_name}",
            _act(_name),
            methods=["POST"],
            name=f"{_name}_message",
            summary=_row.summary,
            description=_row.details,
            dependencies=[requires(_name)],
            responses=problems(404, 409, 412, 415),
            tags=["inbox" if _row.noun == "inbox" else "acts"],
        )
