"""Endpoints that act on many messages, and roll back local transactions: previewed, ordered, watched, cancelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from outbox.console.api import acts, answers, fields
from outbox.console.api.answers import problems
from outbox.console.api.fields import IdempotencyKey, IfMatch, expected_version, order_key
from outbox.console.console import Console
from outbox.console.permissions import Permission
from outbox.errors import VersionMismatch
from outbox.operator.model import Action, OperationItem, OperationRow, Page, Preview, Selector, Target

_ORDER_ERRORS = problems(404, 409, 415)


def add_routes(router: APIRouter, console: Console) -> None:
    """Add the endpoints."""
    _orders(router, console)
    _rollbacks(router, console)
    _by_ids(router, console)
    _existing(router, console)


def _orders(router: APIRouter, console: Console) -> None:
    @router.post("/operations/preview", response_model=answers.Preview, responses=_ORDER_ERRORS, tags=["operations"])
    def preview(body: acts.OperationPreview, request: Request) -> Preview:
        """Return what an operation would do; writes nothing. Its token goes with the order."""
        console.demand(request, body.action)
        return console.admin.preview(
            body.action, body.selector.selector(), database=body.database, options=body.options.chosen()
        )

    @router.post(
        "/operations", status_code=202, response_model=answers.Operation, responses=_ORDER_ERRORS, tags=["operations"]
    )
    def start(
        body: acts.Order, request: Request, response: Response, idempotency_key: IdempotencyKey = None
    ) -> OperationRow:
        """Order an operation, which workers carry out. The same Idempotency-Key returns the same operation."""
        console.demand(request, body.action)
        ordered = console.admin.start(
            body.action,
            body.selector.selector(),
            actor=console.actor_of(request),
            reason=body.reason,
            token=body.token,
            database=body.database,
            options=body.options.chosen(),
            rate=body.rate,
            idempotency_key=order_key(console.principal_of(request), idempotency_key),
        )
        return _located(console, request, response, ordered)


def _rollbacks(router: APIRouter, console: Console) -> None:
    needed = [console.requires(Action.ROLLBACK)]

    @router.post(
        "/messages/{message_id}/rollback/preview",
        dependencies=needed,
        response_model=answers.Preview,
        responses=_ORDER_ERRORS,
        tags=["operations"],
    )
    def preview_rollback(message_id: UUID, body: acts.RollbackPreview) -> Preview:
        """Return what a rollback of the local transaction would do; writes nothing."""
        return console.admin.preview(Action.ROLLBACK, _one(message_id), database=body.database, options=body.options())

    @router.post(
        "/messages/{message_id}/rollback",
        status_code=202,
        dependencies=needed,
        response_model=answers.Operation,
        responses=_ORDER_ERRORS | problems(412),
        tags=["operations"],
    )
    def rollback(
        message_id: UUID,
        body: acts.Rollback,
        request: Request,
        response: Response,
        if_match: IfMatch = None,
        idempotency_key: IdempotencyKey = None,
    ) -> OperationRow:
        """Order that the local transaction of a message is rolled back, by the function that the service registered."""
        expected = expected_version(if_match)
        if expected is not None and console.admin.message(message_id).version != expected:
            raise VersionMismatch(f"message {message_id} has changed since you saw it; look at it again")
        ordered = console.admin.start(
            Action.ROLLBACK,
            _one(message_id),
            actor=console.actor_of(request),
            reason=body.reason,
            token=body.token,
            database=body.database,
            options=body.options(),
            idempotency_key=order_key(console.principal_of(request), idempotency_key),
        )
        return _located(console, request, response, ordered)


def _by_ids(router: APIRouter, console: Console) -> None:
    for name, action in (("reSend", Action.RESEND), ("rollback", Action.ROLLBACK)):
        router.add_api_route(
            f"/messages/{name}",
            _on_ids(console, action),
            methods=["POST"],
            status_code=202,
            name=f"{action}_by_ids",
            summary=f"Order a {action} of the messages of these ids",
            description="The short way for `POST /operations`; no preview is needed for messages that are named.",
            dependencies=[console.requires(action)],
            response_model=answers.Operation,
            responses=_ORDER_ERRORS,
            tags=["operations"],
        )


def _on_ids(console: Console, action: Action) -> Callable[..., Any]:
    def order(
        body: acts.Ids, request: Request, response: Response, idempotency_key: IdempotencyKey = None
    ) -> OperationRow:
        ordered = console.admin.start(
            action,
            body.selector(),
            actor=console.actor_of(request),
            reason=body.reason,
            database=body.database,
            rate=body.rate,
            idempotency_key=order_key(console.principal_of(request), idempotency_key),
        )
        return _located(console, request, response, ordered)

    return order


def _existing(router: APIRouter, console: Console) -> None:
    @router.get("/operations", response_model=answers.OperationPage, responses=problems(), tags=["operations"])
    def operations(wanted: Annotated[fields.Operations, Query()]) -> Page[OperationRow]:
        """Return operations, the newest first."""
        return console.admin.operations(wanted.page(), state=wanted.state, database=wanted.database)

    @router.get(
        "/operations/{operation_id}", response_model=answers.Operation, responses=problems(404), tags=["operations"]
    )
    def operation(operation_id: UUID) -> OperationRow:
        """Return an operation, and how far it is."""
        return console.admin.operation(operation_id)

    @router.get(
        "/operations/{operation_id}/items",
        response_model=answers.ItemPage,
        responses=problems(404),
        tags=["operations"],
    )
    def items(operation_id: UUID, wanted: Annotated[fields.Items, Query()]) -> Page[OperationItem]:
        """Return the items of an operation in their order, and what became of each."""
        return console.admin.operation_items(operation_id, wanted.page(), state=wanted.state)

    @router.post(
        "/operations/{operation_id}/cancel",
        dependencies=[console.requires(Permission.CANCEL)],
        response_model=answers.Operation,
        responses=problems(404, 409, 415),
        tags=["operations"],
    )
    def cancel(operation_id: UUID, body: acts.Why, request: Request) -> OperationRow:
        """Cancel what is left of an operation; what was done stays done."""
        return console.admin.cancel(operation_id, actor=console.actor_of(request), reason=body.reason)


def _one(message_id: UUID) -> Selector:
    return Selector(targets=(Target(message_id),))


def _located(console: Console, request: Request, response: Response, ordered: OperationRow) -> OperationRow:
    response.headers["Location"] = console.path(request, "api", "v1", "operations", ordered.id)
    return ordered
