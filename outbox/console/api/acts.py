"""Endpoints of the acts: one for each row of `outbox.operator.acts.ACTS`, made of what the row says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Response

from outbox.console.api.bulk_jobs import located
from outbox.console.api.requests import (
    PREFIX,
    IdempotencyKey,
    IfMatch,
    etag,
    expected_version,
    from_body,
    order_key,
    problems,
)
from outbox.console.context import Context, RequestContext, requires
from outbox.errors import VersionMismatch
from outbox.operator.acts import ACTS, Act
from outbox.operator.model import BulkJob, MessageView, Preview, Selector, Target
from outbox.reader import option

Group = Annotated[str, Path(max_length=120, pattern=r"^[%|a-zA-Z0-9_-]+$")]

router = APIRouter(prefix=PREFIX)


@dataclass(frozen=True, slots=True)
class Acted:
    """What came of an act, in a sentence, and the message as it is now."""

    outcome: str
    message: MessageView


@dataclass(frozen=True, slots=True)
class _Body:
    database: str | None = option(None, "The database, where several have the message.", most=1000)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the act that are set."""
        own = {"database", "reason", "token"}
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in own}
        return {name: value for name, value in found.items() if value not in (None, False)}


_REASON = ("reason", str, option("", "Why; the audit records it.", most=2000))
_TOKEN = ("token", str | None, option(None, "The token of the preview.", most=20_000))


def _body_of(act: Act, *more: tuple[str, Any, Any]) -> Any:
    """Return the body of an endpoint of an act: its options, and ``more`` fields."""
    fields: list[Any] = list(more)
    for each in act.options:
        is_flag = each.type is bool
        fields.append((each.name, bool if is_flag else each.type | None, option(False if is_flag else None, each.help)))
    namespace = {"__doc__": act.summary}
    return from_body(
        make_dataclass(f"{act.name.title()}Body", fields, bases=(_Body,), frozen=True, namespace=namespace)
    )


def _act(act: Act) -> Callable[..., Acted]:
    read = _body_of(act, _REASON)

    def on_message(
        context: Context, message_id: UUID, response: Response, body: Any = read, if_match: IfMatch = None
    ) -> Acted:
        return _do(context, act, Target(message_id), body, response, if_match)

    def in_group(
        context: Context, group: Group, message_id: UUID, response: Response, body: Any = read, if_match: IfMatch = None
    ) -> Acted:
        return _do(context, act, Target(message_id, group), body, response, if_match)

    return in_group if act.noun == "inbox" else on_message


def _do(
    context: RequestContext, act: Act, target: Target, body: Any, response: Response, if_match: str | None
) -> Acted:
    outcome = context.operator.act(
        act.name,
        target,
        by=context.actor,
        why=body.reason,
        options=body.options,
        version=expected_version(if_match),
        database=body.database,
    )
    view = context.operator.message(target.message_id)
    response.headers["ETag"] = etag(view.version)
    return Acted(outcome, view)


def _preview(act: Act) -> Callable[..., Preview]:
    read = _body_of(act)

    def preview(context: Context, message_id: UUID, body: Any = read) -> Preview:
        return context.operator.preview(act.name, _one(message_id), database=body.database, options=body.options)

    return preview


def _order(act: Act) -> Callable[..., BulkJob]:
    read = _body_of(act, _REASON, _TOKEN)

    def order(
        context: Context,
        message_id: UUID,
        response: Response,
        body: Any = read,
        if_match: IfMatch = None,
        idempotency_key: IdempotencyKey = None,
    ) -> BulkJob:
        expected = expected_version(if_match)
        if expected is not None and context.operator.message(message_id).version != expected:
            raise VersionMismatch(f"message {message_id} has changed since you read it; read it again, then decide")
        job = context.operator.start(
            act.name,
            _one(message_id),
            by=context.actor,
            why=body.reason,
            token=body.token,
            database=body.database,
            options=body.options,
            idempotency_key=order_key(context.principal, idempotency_key),
        )
        return located(context, response, job)

    return order


def _one(message_id: UUID) -> Selector:
    return Selector(targets=(Target(message_id),))


def _add(act: Act) -> None:
    path = f"{'/inbox/{group}' if act.noun == 'inbox' else '/messages'}/{{message_id}}/{act.name}"
    shared: dict[str, Any] = {
        "methods": ["POST"],
        "description": f"{act.details}\n\nAn example of a reason: {act.why}.",
        "dependencies": [requires(act.name)],
        "tags": [f"acts on {act.noun}"],
    }
    if not act.as_job:
        errors = problems(404, 409, 412, 415)
        router.add_api_route(path, _act(act), name=act.name, summary=act.summary, responses=errors, **shared)
        return
    shared["responses"] = problems(404, 409, 415)
    router.add_api_route(
        f"{path}/preview", _preview(act), name=f"preview_{act.name}", summary=f"Preview: {act.summary}", **shared
    )
    shared["responses"] = problems(404, 409, 412, 415)
    router.add_api_route(path, _order(act), name=act.name, summary=act.summary, status_code=202, **shared)


for _row in ACTS.values():
    _add(_row)
