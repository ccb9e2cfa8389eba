"""Endpoints of bulk jobs, and of compensations: previewed, ordered, watched, cancelled."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response

from outbox.console.api import acts, fields
from outbox.console.api.answers import problems
from outbox.console.api.fields import PREFIX, IdempotencyKey, IfMatch, expected_version, order_key
from outbox.console.context import Context, requires
from outbox.console.permissions import Permission
from outbox.errors import VersionMismatch
from outbox.operator.model import Action, OperationItem, OperationRow, Page, Preview, Selector, Target

router = APIRouter(prefix=PREFIX, responses=problems(), tags=["operations"])

_ORDER_ERRORS = problems(404, 409, 415)


@router.post("/operations/preview", responses=_ORDER_ERRORS)
def preview(context: Context, body: acts.OperationPreview) -> Preview:
    """Return what an operation would do; writes nothing. Its token goes with the order."""
    context.demand(body.action)
    return context.admin.preview(
        body.action, body.selector.selector(), database=body.database, options=body.options.chosen()
    )


@router.post("/operations", status_code=202, responses=_ORDER_ERRORS)
def start(
    context: Context, body: acts.Order, response: Response, idempotency_key: IdempotencyKey = None
) -> OperationRow:
    """Order an operation, which workers carry out. The same Idempotency-Key returns the same operation."""
    context.demand(body.action)
    ordered = context.admin.start(
        body.action,
        body.selector.selector(),
        actor=context.actor,
        reason=body.reason,
        token=body.token,
        database=body.database,
        options=body.options.chosen(),
        rate=body.rate,
        idempotency_key=order_key(context.principal, idempotency_key),
    )
    return _located(context, response, ordered)


@router.post(
    "/messages/{message_id}/rollback/preview", dependencies=[requires(Action.ROLLBACK)], responses=_ORDER_ERRORS
)
def preview_rollback(context: Context, message_id: UUID, body: acts.RollbackPreview) -> Preview:
    """Return what a rollback of the local transaction would do; writes nothing."""
    return context.admin.preview(Action.ROLLBACK, _one(message_id), database=body.database, options=body.options())


@router.post(
    "/messages/{message_id}/rollback",
    status_code=202,
    dependencies=[requires(Action.ROLLBACK)],
    responses=_ORDER_ERRORS | problems(412),
)
def rollback(
    context: Context,
    message_id: UUID,
    body: acts.Rollback,
    response: Response,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> OperationRow:
    """Order that the local transaction of a message is rolled back, by the function that the service registered."""
    expected = expected_version(if_match)
    if expected is not None and context.admin.message(message_id).version != expected:
        raise VersionMismatch(f"message {message_id} has changed since you saw it; look at it again")
    ordered = context.admin.start(
        Action.ROLLBACK,
        _one(message_id),
        actor=context.actor,
        reason=body.reason,
        token=body.token,
        database=body.database,
        options=body.options(),
        idempotency_key=order_key(context.principal, idempotency_key),
    )
    return _located(context, response, ordered)


@router.post("/messages/reSend", status_code=202, dependencies=[requires(Action.RESEND)], responses=_ORDER_ERRORS)
def resend_by_ids(
    context: Context, body: acts.Ids, response: Response, idempotency_key: IdempotencyKey = None
) -> OperationRow:
    """Order a resend of the messages of these ids: the short way for `POST /operations`, without a preview."""
    return _by_ids(context, Action.RESEND, body, response, idempotency_key)


@router.post("/messages/rollback", status_code=202, dependencies=[requires(Action.ROLLBACK)], responses=_ORDER_ERRORS)
def rollback_by_ids(
    context: Context, body: acts.Ids, response: Response, idempotency_key: IdempotencyKey = None
) -> OperationRow:
    """Order a rollback of the messages of these ids: the short way for `POST /operations`, without a preview."""
    return _by_ids(context, Action.ROLLBACK, body, response, idempotency_key)


@router.get("/operations")
def operations(context: Context, query: Annotated[fields.Operations, Query()]) -> Page[OperationRow]:
    """Return operations, the newest first."""
    return context.admin.operations(query.page(), state=query.state, database=query.database)


@router.get("/operations/{operation_id}", responses=problems(404))
def operation(context: Context, operation_id: UUID) -> OperationRow:
    """Return an operation, and how far it is."""
    return context.admin.operation(operation_id)


@router.get("/operations/{operation_id}/items", responses=problems(404))
def items(context: Context, operation_id: UUID, query: Annotated[fields.Items, Query()]) -> Page[OperationItem]:
    """Return the items of an operation in their order, and what became of each."""
    return context.admin.operation_items(operation_id, query.page(), state=query.state)


@router.post(
    "/operations/{operation_id}/cancel",
    dependencies=[requires(Permission.CANCEL)],
    responses=problems(404, 409, 415),
)
def cancel(context: Context, operation_id: UUID, body: acts.Why) -> OperationRow:
    """Cancel what is left of an operation; what was done stays done."""
    return context.admin.cancel(operation_id, actor=context.actor, reason=body.reason)


def _by_ids(
    context: Context, action: Action, body: acts.Ids, response: Response, idempotency_key: str | None
) -> OperationRow:
    ordered = context.admin.start(
        action,
        body.selector(),
        actor=context.actor,
        reason=body.reason,
        database=body.database,
        rate=body.rate,
        idempotency_key=order_key(context.principal, idempotency_key),
    )
    return _located(context, response, ordered)


def _one(message_id: UUID) -> Selector:
    return Selector(targets=(Target(message_id),))


def _located(context: Context, response: Response, ordered: OperationRow) -> OperationRow:
    response.headers["Location"] = context.url("api", "v1", "operations", ordered.id)
    return ordered
