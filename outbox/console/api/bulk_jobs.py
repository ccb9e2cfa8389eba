"""Endpoints of bulk jobs: previewed, ordered, watched, cancelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Response

from outbox.console.api.requests import (
    PREFIX,
    IdempotencyKey,
    Listed,
    PageQuery,
    from_body,
    from_query,
    order_key,
    problems,
)
from outbox.console.context import Context, RequestContext, requires
from outbox.console.permissions import CANCEL
from outbox.errors import InvalidRequest
from outbox.operator.acts import ACTS
from outbox.operator.model import (
    MAX_IDS,
    BulkItem,
    BulkItemState,
    BulkJob,
    BulkJobFilter,
    HalfFilter,
    InboxFilter,
    MessageFilter,
    Page,
    Preview,
    Selector,
    Target,
)
from outbox.reader import option

router = APIRouter(prefix=PREFIX, responses=problems(), tags=["bulk jobs"])

_ERRORS = problems(404, 409, 415)


@dataclass(frozen=True, slots=True)
class SelectorBody:
    """What a bulk job acts on: exactly one of ``ids`` (of a ``group``), ``targets`` and the filters."""

    ids: tuple[UUID, ...] | None = option(None, "Messages by their ids.")
    group: str | None = option(None, "The group of the ids, for acts on an inbox.", most=1000)
    targets: tuple[Target, ...] | None = option(None, "Messages, each with a group of its own.")
    messages: MessageFilter | None = option(None, "The messages that match.")
    inbox: InboxFilter | None = option(None, "The inbox rows that match.")
    halves: HalfFilter | None = option(None, "The undecided halves that match.")

    def selector(self) -> Selector:
        """Return the selection as the operator takes it.

        Raises:
            InvalidRequest: not exactly one of them, a group without ids, or too many ids.
        """
        names = [name for name in ("ids", "targets", "messages", "inbox", "halves") if getattr(self, name) is not None]
        if len(names) != 1:
            found = f"it has {', '.join(names)}" if names else "it has none"
            raise InvalidRequest(f"a selector has one of ids, targets, messages, inbox and halves; {found}", "selector")
        if self.group is not None and self.ids is None:
            raise InvalidRequest("group goes with ids; a filter or target has a group of its own", "selector.group")
        targets = tuple(Target(each, self.group) for each in self.ids) if self.ids is not None else self.targets
        if len(targets or ()) > MAX_IDS:
            raise InvalidRequest(f"a selector names at most {MAX_IDS} messages; use a filter", f"selector.{names[0]}")
        return Selector(targets, self.messages, self.inbox, self.halves)


def _action(text: Any) -> str:
    if text not in ACTS:
        raise ValueError(f"one of {', '.join(ACTS)}")
    return str(text)


@dataclass(frozen=True, slots=True)
class PreviewBody:
    """What a bulk job would do."""

    action: str = option(help=f"The act: {', '.join(ACTS)}.", parse=_action)
    selector: SelectorBody = option(help="What it acts on.")
    database: str | None = option(None, "The database, where several have messages that match.", most=1000)
    options: Mapping[str, Any] = option(help="Options of the act.", factory=dict)


@dataclass(frozen=True, slots=True)
class OrderBody(PreviewBody):
    """An order of a bulk job."""

    reason: str = option("", "Why; the audit records it.", most=2000)
    token: str | None = option(None, "The token of the preview; needed where a filter selects.", most=20_000)
    rate: float | None = option(None, "The most items a second.", above=0, most=1e6)


@dataclass(frozen=True, slots=True)
class IdsBody:
    """Messages by their ids."""

    ids: tuple[UUID, ...] = option(help="The ids.")
    reason: str = option("", "Why; the audit records it.", most=2000)
    database: str | None = option(None, "The database, where several have the messages.", most=1000)
    rate: float | None = option(None, "The most messages a second.", above=0, most=1e6)


@dataclass(frozen=True, slots=True)
class ReasonBody:
    """Why something is done."""

    reason: str = option("", "Why; the audit records it.", most=2000)


@dataclass(frozen=True, slots=True)
class ItemsQuery:
    """Which items of a bulk job."""

    state: BulkItemState | None = option(None, "Only items of this state.")


@router.post("/bulk-jobs/preview", responses=_ERRORS)
def preview(context: Context, body: PreviewBody = from_body(PreviewBody)) -> Preview:
    """Return what a bulk job would do; writes nothing. Its token goes with the order."""
    context.demand(body.action)
    return context.operator.preview(body.action, body.selector.selector(), database=body.database, options=body.options)


@router.post("/bulk-jobs", status_code=202, responses=_ERRORS)
def order(
    context: Context,
    response: Response,
    body: OrderBody = from_body(OrderBody),
    idempotency_key: IdempotencyKey = None,
) -> BulkJob:
    """Order a bulk job, which workers carry out. The same Idempotency-Key returns the same bulk job."""
    context.demand(body.action)
    job = context.operator.start(
        body.action,
        body.selector.selector(),
        by=context.actor,
        why=body.reason,
        token=body.token,
        database=body.database,
        options=body.options,
        rate=body.rate,
        idempotency_key=order_key(context.principal, idempotency_key),
    )
    return located(context, response, job)


@router.post("/messages/reSend", status_code=202, dependencies=[requires("resend")], responses=_ERRORS)
def resend_by_ids(
    context: Context, response: Response, body: IdsBody = from_body(IdsBody), idempotency_key: IdempotencyKey = None
) -> BulkJob:
    """Order a resend of the messages of these ids: an alias of `POST /bulk-jobs`, without a preview."""
    ordered = OrderBody("resend", SelectorBody(ids=body.ids), body.database, {}, body.reason, None, body.rate)
    return order(context, response, ordered, idempotency_key)


@router.get("/bulk-jobs")
def bulk_jobs(context: Context, query: Listed[BulkJobFilter] = from_query(BulkJobFilter, PageQuery)) -> Page[BulkJob]:
    """Return bulk jobs, the newest first."""
    return context.operator.bulk_jobs(*query)


@router.get("/bulk-jobs/{bulk_job_id}", responses=problems(404))
def bulk_job(context: Context, bulk_job_id: UUID) -> BulkJob:
    """Return a bulk job, and how far it is."""
    return context.operator.bulk_job(bulk_job_id)


@router.get("/bulk-jobs/{bulk_job_id}/items", responses=problems(404))
def bulk_items(
    context: Context, bulk_job_id: UUID, query: Listed[ItemsQuery] = from_query(ItemsQuery, PageQuery)
) -> Page[BulkItem]:
    """Return the items of a bulk job in their order, and what became of each."""
    criteria, page = query
    return context.operator.bulk_items(bulk_job_id, page, state=criteria.state)


@router.post("/bulk-jobs/{bulk_job_id}/cancel", dependencies=[requires(CANCEL)], responses=_ERRORS)
def cancel(context: Context, bulk_job_id: UUID, body: ReasonBody = from_body(ReasonBody)) -> BulkJob:
    """Cancel what is left of a bulk job; what was done stays done."""
    return context.operator.cancel(bulk_job_id, by=context.actor, why=body.reason)


def located(context: RequestContext, response: Response, job: BulkJob) -> BulkJob:
    """Return a bulk job that was ordered, with the header that says where it is."""
    response.headers["Location"] = context.url("api", "v1", "bulk-jobs", job.id)
    return job
