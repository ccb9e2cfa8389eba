"""Bulk jobs: the preview of an act on many messages, the form that orders it, its progress, and its cancellation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated
from uuid import UUID, uuid4

from fastapi import APIRouter, Form, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData

from outbox.console.auth import only_reads
from outbox.console.context import requires
from outbox.console.pages import fields
from outbox.console.pages.fields import Fields
from outbox.console.pages.lists import listing
from outbox.console.pages.view import PageView, View
from outbox.console.permissions import Permission
from outbox.errors import InvalidRequest
from outbox.operator.acts import ACTS
from outbox.operator.model import BulkJob, Page, PageRequest, Selector, Target


@dataclass(frozen=True, slots=True)
class BulkRequest:
    """An act on the named targets, or on all that a filter of a list fits.

    ``targets`` are as the checkboxes name them: id, group and database, with ``/`` between them.
    """

    action: str
    of: str
    filter: str
    targets: tuple[str, ...]
    database: str | None

    @classmethod
    def read(cls, form: Fields) -> BulkRequest:
        """Return what a form asks for.

        Raises:
            InvalidRequest: no such action or list, or nothing was selected.
        """
        action, of = form.text("action") or "", form.text("of") or ""
        if action not in ACTS:
            raise InvalidRequest(f"action {action!r} must be one of: {', '.join(ACTS)}", "action")
        if of not in {"messages", "inbox", "halves"}:
            raise InvalidRequest(f"of {of!r} must be messages, inbox or halves", "of")
        targets = () if form.text("all") else form.texts("target")
        if not targets and not form.text("all"):
            raise InvalidRequest("no row is selected; select some, or all that the filter fits", "target")
        return cls(action, of, _filter(form), targets, form.text("in"))

    @property
    def selector(self) -> Selector:
        """What the bulk job acts on.

        Raises:
            InvalidRequest: a target or a filter that isn't one.
        """
        if self.targets:
            return Selector(targets=tuple(target for target, _ in map(_target, self.targets)))
        query = Fields.of_query(self.filter)
        match self.of:
            case "inbox":
                return Selector(inbox=fields.inbox_filter(query))
            case "halves":
                return Selector(halves=fields.half_filter(query))
            case _:
                return Selector(messages=fields.message_filter(query))

    def within(self, database: str) -> BulkRequest:
        """Return what of it is in a database."""
        return replace(self, targets=tuple(self.by_database().get(database, ())), database=database)

    def by_database(self) -> Mapping[str, Sequence[str]]:
        """Return the targets of each database that has some."""
        found: dict[str, list[str]] = defaultdict(list)
        for text in self.targets:
            found[_target(text)[1]].append(text)
        return found


router = APIRouter(include_in_schema=False)


@router.get("/bulk")
def of_filter(view: View) -> Response:
    """Show what an act on all that a filter matches would do."""
    query = Fields.of_query(view.request.url.query)
    return _preview(view, BulkRequest.read(Fields([*query.pairs(), ("all", "1")])))


@router.post("/bulk")
@only_reads
async def of_selection(view: View) -> Response:
    """Show what an act on the selected rows would do."""
    request = BulkRequest.read(_form(await view.request.form()))
    return await run_in_threadpool(_preview, view, request)


@router.post("/bulk/start")
async def start(view: View) -> Response:
    """Order the bulk job."""
    form = _form(await view.request.form())
    request = BulkRequest.read(form)
    view.context.demand(request.action)
    compensating = request.action == "compensate"
    if compensating and form.text("typed") != form.text("count"):
        raise InvalidRequest("to go on, type the number of messages as it stands there", "typed")

    def ordered() -> UUID:
        return view.admin.start(
            request.action,
            request.selector,
            by=view.context.actor,
            why=form.text("reason") or "",
            token=form.text("token"),
            database=request.database,
            options={"acknowledge_delivered": True} if compensating and form.text("acknowledged") else {},
            rate=form.number("rate"),
            idempotency_key=form.text("key"),
        ).id

    return view.done("start", "bulk-jobs", await run_in_threadpool(ordered))


STATES = ("waiting", "running", "done", "partly", "cancelled")
ITEM_STATES = ("pending", "done", "skipped", "failed", "cancelled")


@router.get("/bulk-jobs")
def bulk_jobs(view: View) -> Response:
    """Show the bulk jobs."""

    def fetch(query: Fields, page: PageRequest) -> Page[BulkJob]:
        return view.admin.bulk_jobs(fields.bulk_job_filter(query), page)

    found = listing(view, "bulk-jobs", {"state": "state", "database": "database"}, fetch)
    return view.page("bulk_jobs.html", found.status, list=found, states=STATES)


@router.get("/bulk-jobs/{bulk_job_id}")
def bulk_job(view: View, bulk_job_id: UUID) -> Response:
    """Show a bulk job, and what became of its items."""
    job = view.admin.bulk_job(bulk_job_id)
    items = listing(
        view,
        "items",
        {"state": "state"},
        lambda query, page: view.admin.bulk_items(bulk_job_id, page, state=query.text("state")),
    )
    may_cancel = job.finished_at is None and view.context.may(Permission.CANCEL)
    return view.page("bulk_job.html", bulk_job=job, list=items, states=ITEM_STATES, may_cancel=may_cancel)


@router.get("/bulk-jobs/{bulk_job_id}/cancel", dependencies=[requires(Permission.CANCEL)])
def confirm_cancel(view: View, bulk_job_id: UUID) -> Response:
    """Show what cancelling would leave undone, with the form that does it."""
    return view.page("cancel.html", bulk_job=view.admin.bulk_job(bulk_job_id))


@router.post("/bulk-jobs/{bulk_job_id}/cancel", dependencies=[requires(Permission.CANCEL)])
def cancel(view: View, bulk_job_id: UUID, reason: Annotated[str, Form(max_length=1000)] = "") -> Response:
    """Cancel what is left of a bulk job."""
    view.admin.cancel(bulk_job_id, by=view.context.actor, why=reason)
    return view.done("cancel", "bulk-jobs", bulk_job_id)


def _preview(view: PageView, order: BulkRequest) -> Response:
    view.context.demand(order.action)
    admin, databases = view.admin, order.by_database()
    if order.targets:
        if order.database is None and len(databases) > 1:
            return _choose(view, order, databases)
        order = order.within(order.database or next(iter(databases)))
    try:
        preview = admin.preview(order.action, order.selector, database=order.database)
    except InvalidRequest as error:
        if error.field != "database" or order.database is not None:
            raise
        having = admin.databases.having(ACTS[order.action].part)
        return _choose(view, order, {database.name: [] for database in having})
    return view.page("bulk.html", order=order, preview=preview, act=ACTS[order.action], key=uuid4().hex)


def _choose(view: PageView, order: BulkRequest, databases: Mapping[str, Sequence[str]]) -> Response:
    return view.page("choose.html", order=order, databases=databases, act=ACTS[order.action])


def _form(form: FormData) -> Fields:
    return Fields([(name, value) for name, value in form.multi_items() if isinstance(value, str)])


def _filter(form: Fields) -> str:
    """Return the filter: as a query in one field, or the fields themselves."""
    query = form.text("filter")
    own = {"action", "of", "all", "target", "filter", "in"}
    return query or Fields([pair for pair in form.pairs() if pair[0] not in own]).query()


def _target(text: str) -> tuple[Target, str]:
    message, _, rest = text.partition("/")
    group, _, database = rest.partition("/")
    try:
        return Target(UUID(message), group or None), database
    except ValueError:
        raise InvalidRequest(f"target {text[:80]!r} must be id/group/database", "target") from None
