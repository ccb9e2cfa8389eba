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
from outbox.operator.model import BulkItem, BulkJob, BulkJobFilter, Page, Preview, Selector, Target

router = APIRouter(prefix=PREFIX, responses=problems(), tags=["bulk-jobs"])

_ORDER_ERRORS = problems(404, 409, 415)


@router.post("/bulk-jobs/preview", responses=_ORDER_ERRORS)
def preview(context: Context, body: acts.BulkJobPreview) -> Preview:
    """Return what a bulk job would do; writes nothing. Its token goes with the order."""
    context.demand(body.action)
    return context.admin.preview(
        body.action, body.selector.selector(), database=body.database, options=body.options.chosen()
    )


@router.post("/bulk-jobs", status_code=202, responses=_ORDER_ERRORS)
def start(context: Context, body: acts.Order, response: Response, idempotency_key: IdempotencyKey = None) -> BulkJob:
    """Order a bulk job, which workers carry out. The same Idempotency-Key returns the same bulk job."""
    context.demand(body.action)
    ordered = context.admin.start(
        body.action,
        body.selector.selector(),
        by=context.actor,
        why=body.reason,
        token=body.token,
        database=body.database,
        options=body.options.chosen(),
        rate=body.rate,
        idempotency_key=order_key(context.principal, idempotency_key),
    )
    return _located(context, response, ordered)


@router.post(
    "/messages/{message_id}/compensate/preview", dependencies=[requires("compensate")], responses=_ORDER_ERRORS
)
def preview_compensation(context: Context, message_id: UUID, body: acts.CompensationPreview) -> Preview:
    """Return what a compensation of the local transaction would do; writes nothing."""
    return context.admin.preview("compensate", _one(message_id), database=body.database, options=body.options())


@router.post(
    "/messages/{message_id}/compensate",
    status_code=202,
    dependencies=[requires("compensate")],
    responses=_ORDER_ERRORS | problems(412),
)
def compensate(
    context: Context,
    message_id: UUID,
    body: acts.CompensationOrder,
    response: Response,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> BulkJob:
    """Order that the local transaction of a message is compensated, by the function that the service registered."""
    expected = expected_version(if_match)
    if expected is not None and context.admin.message(message_id).version != expected:
        raise VersionMismatch(f"message {message_id} has changed since you saw it; look at it again")
    ordered = context.admin.start(
        "compensate",
        _one(message_id),
        by=context.actor,
        why=body.reason,
        token=body.token,
        database=body.database,
        options=body.options(),
        idempotency_key=order_key(context.principal, idempotency_key),
    )
    return _located(context, response, ordered)


@router.post("/messages/reSend", status_code=202, dependencies=[requires("resend")], responses=_ORDER_ERRORS)
def resend_by_ids(
    context: Context, body: acts.Ids, response: Response, idempotency_key: IdempotencyKey = None
) -> BulkJob:
    """Order a resend of the messages of these ids: the short way for `POST /bulk_jobs`, without a preview."""
    return _by_ids(context, "resend", body, response, idempotency_key)


@router.post("/messages/compensate", status_code=202, dependencies=[requires("compensate")], responses=_ORDER_ERRORS)
def compensate_by_ids(
    context: Context, body: acts.Ids, response: Response, idempotency_key: IdempotencyKey = None
) -> BulkJob:
    """Order a compensation of the messages of these ids: the short way for `POST /bulk_jobs`, without a preview."""
    return _by_ids(context, "compensate", body, response, idempotency_key)


@router.get("/bulk-jobs")
def bulk_jobs(context: Context, query: Annotated[fields.BulkJobs, Query()]) -> Page[BulkJob]:
    """Return bulk jobs, the newest first."""
    return context.admin.bulk_jobs(BulkJobFilter(query.database, query.state), query.page())


@router.get("/bulk-jobs/{bulk_job_id}", responses=problems(404))
def bulk_job(context: Context, bulk_job_id: UUID) -> BulkJob:
    """Return a bulk job, and how far it is."""
    return context.admin.bulk_job(bulk_job_id)


@router.get("/bulk-jobs/{bulk_job_id}/items", responses=problems(404))
def items(context: Context, bulk_job_id: UUID, query: Annotated[fields.Items, Query()]) -> Page[BulkItem]:
    """Return the items of a bulk job in their order, and what became of each."""
    return context.admin.bulk_items(bulk_job_id, query.page(), state=query.state)


@router.post(
    "/bulk-jobs/{bulk_job_id}/cancel",
    dependencies=[requires(Permission.CANCEL)],
    responses=problems(404, 409, 415),
)
def cancel(context: Context, bulk_job_id: UUID, body: acts.Why) -> BulkJob:
    """Cancel what is left of a bulk job; what was done stays done."""
    return context.admin.cancel(bulk_job_id, by=context.actor, why=body.reason)


def _by_ids(context: Context, action: str, body: acts.Ids, response: Response, idempotency_key: str | None) -> BulkJob:
    ordered = context.admin.start(
        action,
        body.selector(),
        by=context.actor,
        why=body.reason,
        database=body.database,
        rate=body.rate,
        idempotency_key=order_key(context.principal, idempotency_key),
    )
    return _located(context, response, ordered)


def _one(message_id: UUID) -> Selector:
    return Selector(targets=(Target(message_id),))


def _located(context: Context, response: Response, ordered: BulkJob) -> BulkJob:
    response.headers["Location"] = context.url("api", "v1", "bulk-jobs", ordered.id)
    return ordered
