"""Bulk jobs: the preview of an act on many messages, the form that orders it, its progress, and its cancellation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlencode
from uuid import UUID, uuid4

from fastapi import APIRouter, Response

from outbox.console.api.lists import ItemFilter
from outbox.console.auth import only_reads
from outbox.console.context import requires
from outbox.console.pages.lists import FormPairs, listing, names_of, options_of, pairs_of, read
from outbox.console.pages.view import PageView, View
from outbox.console.permissions import CANCEL
from outbox.errors import InvalidRequest
from outbox.operator.acts import Act, act_named
from outbox.operator.model import BulkItemState, HalfFilter, InboxFilter, MessageFilter, Selector, Target
from outbox.reader import option

_FILTERS: Mapping[str, type] = {"messages": MessageFilter, "inbox": InboxFilter, "halves": HalfFilter}


@dataclass(frozen=True, slots=True)
class BulkForm:
    """An act on the selected rows of a list (``target``), or on ``all`` that its filter matches.

    ``target`` is as the checkboxes name the rows: id, group and database, with ``/`` between them. ``of`` is the list.
    """

    action: str = option("")
    of: Literal["messages", "inbox", "halves"] = option("messages")
    filter: str = option("", most=20_000)
    target: tuple[str, ...] = option(())
    all: bool = option(False)
    chosen: str | None = option(None)

    @property
    def act(self) -> Act:
        """The act; `InvalidRequest` if there is none, or no row is selected."""
        act = act_named(self.action)
        if not self.target and not self.all:
            raise InvalidRequest("no row is selected; select some, or all that the filter fits", "target")
        return act

    @property
    def named(self) -> tuple[str, ...]:
        """The rows that are named."""
        return () if self.all else self.target

    @property
    def selector(self) -> Selector:
        """What the bulk job acts on."""
        if self.named:
            return Selector(targets=tuple(target for target, _ in map(_target, self.named)))
        criteria: Any = read(_FILTERS[self.of], pairs_of(self.filter))
        return Selector(**{self.of: criteria})

    def by_database(self) -> Mapping[str, Sequence[str]]:
        """Return the named rows of each database that has some."""
        found: dict[str, list[str]] = defaultdict(list)
        for text in self.named:
            found[_target(text)[1]].append(text)
        return found


@dataclass(frozen=True, slots=True)
class OrderForm:
    """What the form of a preview sends beside: ``typed`` must be ``count`` where a bulk job can't be taken back."""

    reason: str = option("", most=4000)
    token: str | None = option(None)
    rate: float | None = option(None, above=0, most=1e6)
    key: str | None = option(None)
    typed: str = option("")
    count: str = option("")


router = APIRouter(include_in_schema=False)


@router.get("/bulk")
def of_filter(view: View) -> Response:
    """Show what an act on all that a filter matches would do."""
    pairs = pairs_of(view.request.url.query)
    criteria = [pair for pair in pairs if pair[0] not in names_of(BulkForm)]
    return _preview(view, replace(read(BulkForm, pairs), all=True, filter=urlencode(criteria)))


@router.post("/bulk")
@only_reads
def of_selection(view: View, pairs: FormPairs) -> Response:
    """Show what an act on the selected rows would do."""
    return _preview(view, read(BulkForm, pairs))


@router.post("/bulk/start")
def start(view: View, pairs: FormPairs) -> Response:
    """Order the bulk job."""
    form, order = read(BulkForm, pairs), read(OrderForm, pairs)
    act = form.act
    view.context.demand(act.name)
    if act.as_job and order.typed != order.count:
        raise InvalidRequest("to go on, type the number of messages as it stands there", "typed")
    job = view.operator.start(
        act.name,
        form.selector,
        by=view.context.actor,
        why=order.reason,
        token=order.token,
        database=form.chosen,
        options=options_of(act, pairs),
        rate=order.rate,
        idempotency_key=order.key,
    )
    return view.done("start", "bulk-jobs", job.id)


@router.get("/bulk-jobs/{bulk_job_id}")
def bulk_job(view: View, bulk_job_id: UUID) -> Response:
    """Show a bulk job, and what became of its items."""
    job = view.operator.bulk_job(bulk_job_id)
    items = listing(view, ItemFilter, lambda found, page: view.operator.bulk_items(job.id, page, state=found.state))
    may_cancel = job.finished_at is None and view.context.may(CANCEL)
    return view.page("bulk_job.html", bulk_job=job, list=items, states=list(BulkItemState), may_cancel=may_cancel)


@router.get("/bulk-jobs/{bulk_job_id}/cancel", dependencies=[requires(CANCEL)])
def confirm_cancel(view: View, bulk_job_id: UUID) -> Response:
    """Show what cancelling would leave undone, with the form that does it."""
    return view.page("cancel.html", bulk_job=view.operator.bulk_job(bulk_job_id))


@router.post("/bulk-jobs/{bulk_job_id}/cancel", dependencies=[requires(CANCEL)])
def cancel(view: View, bulk_job_id: UUID, pairs: FormPairs) -> Response:
    """Cancel what is left of a bulk job."""
    view.operator.cancel(bulk_job_id, by=view.context.actor, why=read(OrderForm, pairs).reason)
    return view.done("cancel", "bulk-jobs", bulk_job_id)


def _preview(view: PageView, form: BulkForm) -> Response:
    act = form.act
    view.context.demand(act.name)
    databases = form.by_database()
    if form.named:
        if form.chosen is None and len(databases) > 1:
            return view.page("choose.html", form=form, databases=databases, act=act)
        chosen = form.chosen or next(iter(databases))
        form = replace(form, target=tuple(databases.get(chosen, ())), chosen=chosen)
    try:
        preview = view.operator.preview(act.name, form.selector, database=form.chosen)
    except InvalidRequest as error:
        if error.field != "database" or form.chosen is not None:
            raise
        having = {database.name: () for database in view.operator.databases.having(act.part)}
        return view.page("choose.html", form=form, databases=having, act=act)
    return view.page("bulk.html", form=form, preview=preview, act=act, key=uuid4().hex)


def _target(text: str) -> tuple[Target, str]:
    message, _, rest = text.partition("/")
    group, _, database = rest.partition("/")
    try:
        return Target(UUID(message), group or None), database
    except ValueError:
        raise InvalidRequest(f"target {text[:80]!r} must be id/group/database", "target") from None
