"""The page of a message, the pages (or dialogs) that ask before an act on one message or on many, and bulk jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlencode
from uuid import UUID, uuid4

from fastapi import APIRouter, Response

from outbox.acts.changes import Act, Actor, Target
from outbox.acts.messages import ACTS, act_named
from outbox.console.api.lists import of_each, types_of
from outbox.console.auth import only_reads
from outbox.console.context import CANCEL, REVEAL, requires
from outbox.console.pages.diagram import Diagram
from outbox.console.pages.lists import FormPairs, Listing, names_of, options_of, pairs_of, read
from outbox.console.pages.view import PageView, View
from outbox.errors import InvalidRequest, VersionMismatch
from outbox.message.model import Status
from outbox.operator import model
from outbox.operator.health.workers import HandlerRow
from outbox.operator.model import MessageView, Selector
from outbox.operator.operator import Operator
from outbox.reader import option

router: APIRouter = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class OrderForm:
    """Take the form before an act, beside the act's options.

    Before a bulk job that can't be taken back, or reaches far, ``typed`` must be ``count``; before one that can't, of
    one message, its key.
    """

    reason: str = option("", most=4000)
    version: str | None = option(None)
    group: str | None = option(None)
    database: str | None = option(None)
    token: str | None = option(None)
    rate: float | None = option(None, above=0, most=1e6)
    key: str | None = option(None)
    typed: str = option("")
    count: int = option(0, least=0)


def _start(
    view: PageView, act: Act, selector: Selector, form: OrderForm, pairs: FormPairs, code: str, database: str | None
) -> Response:
    """Order a bulk job, and lead to its page."""
    job = view.operator.start(
        act.name,
        selector,
        by=view.context.actor,
        why=form.reason,
        token=form.token,
        database=database,
        options=options_of(act, pairs),
        rate=form.rate,
        idempotency_key=form.key,
    )
    return view.done(code, "bulk-jobs", job.id)


# --- one message -------------------------------------------------------------------------------------------


@router.get("/messages/{message_id}")
def message(view: View, message_id: UUID) -> Response:
    """Show a message."""
    return _message_page(view, message_id)


@router.get("/messages/{message_id}/conversation")
def conversation(view: View, message_id: UUID) -> Response:
    """Show the conversation of a message as a sequence diagram, and as a table."""
    found = view.operator.conversation(message_id)
    return view.page("conversation.html", view=found, diagram=Diagram(found))


# Not a link: a reveal is recorded, and nothing that follows links by itself may do it.
@router.post("/messages/{message_id}/reveal", dependencies=[requires(REVEAL)])
def reveal(view: View, message_id: UUID) -> Response:
    """Show a message with its body unmasked."""
    return _message_page(view, message_id, reveal=view.context.actor)


@router.get("/messages/{message_id}/do/{action}")
def confirm(
    view: View, message_id: UUID, action: str, group: str | None = None, database: str | None = None
) -> Response:
    """Show what an act would do, with the form that does it."""
    act = act_named(action)
    view.context.demand(action)
    return _ask(view, view.operator.message(message_id), act, OrderForm(group=group, database=database))


@router.post("/messages/{message_id}/do/{action}")
def do(view: View, message_id: UUID, action: str, pairs: FormPairs) -> Response:
    """Do an act."""
    act, form = act_named(action), read(OrderForm, pairs)
    view.context.demand(action)
    if act.as_job:
        return _order(view, message_id, act, form, pairs)
    view.operator.act(
        action,
        Target(message_id, form.group),
        by=view.context.actor,
        why=form.reason,
        options=options_of(act, pairs),
        version=form.version,
        database=form.database,
    )
    return view.done(action, "messages", message_id)


def _order(view: PageView, message_id: UUID, act: Act, form: OrderForm, pairs: FormPairs) -> Response:
    found = view.operator.message(message_id)
    if form.version and form.version != found.version:
        raise VersionMismatch(
            f"message {message_id} has changed since you looked at it; read it again, then decide again"
        )
    expected = to_type(found)
    if form.typed != expected.strip():
        return _ask(view, found, act, form, fault=f"Nothing was done: to go on, type {expected!r}.")
    selector = Selector(targets=(Target(message_id),))
    return _start(view, act, selector, form, pairs, act.name, found.database)


def to_type(message: MessageView) -> str:
    """Return what has to be typed before a bulk job: the message's key, or its topic where it has none."""
    half = message.half or {}
    return str(half.get("key") or half.get("topic") or message.id)


def states_of(message: MessageView) -> AbstractSet[str]:
    """Return the states of a message for which an act may have an option."""
    fenced = {"fenced"} if message.op is None and message.check and message.check["fenced"] else set()
    delivered = {"delivered"} if any(row.status == "consumed" for row in message.inbox) else set()
    return fenced | delivered


def possible(message: MessageView) -> list[tuple[Act, str | None, str | None]]:
    """Return what can be done now: the act, and for those in an inbox the group and its database."""
    found: list[tuple[Act, str | None, str | None]] = []
    states = states_of(message)
    for act in ACTS.values():
        if any(each.adds & states for each in act.options) or message.actions.get(act.name) == []:
            found.append((act, None, None))
        for group in message.actions.get(act.name, []):
            found += [(act, group, row.database) for row in message.inbox if row.group == group]
    return found


def badges_of(message: MessageView) -> list[str]:
    """Return the statuses that a message's page begins with: its faults first, then how far it has come."""
    rows = {row.status for row in message.inbox if not row.discarded_at}
    is_parked = "parked" in rows or bool(message.check and message.check["parked_at"])
    first = "parked" if is_parked else next((each for each in Status if each.alone and each in rows), None)
    return [status for status in (first, message.status) if status]


def _message_page(view: PageView, message_id: UUID, reveal: Actor | None = None) -> Response:
    found = view.operator.message(message_id, reveal=reveal)
    badges = badges_of(found)
    return view.page("message.html", view=found, acts=possible(found), badges_of=badges, revealed=reveal is not None)


def _ask(view: PageView, found: MessageView, act: Act, form: OrderForm, *, fault: str | None = None) -> Response:
    states = states_of(found)
    topic = (found.half or {}).get("topic")

    def handles(row: HandlerRow) -> bool:
        return (row.kind, row.topic) == (act.handler, topic)

    return view.page(
        "ask.html",
        422 if fault else 200,
        view=found,
        act=act,
        group=form.group,
        database=form.database,
        states=states,
        options=[each for each in act.options if not each.adds or each.adds & states],
        refused=_refused(found, act, form.group),
        expected=to_type(found) if act.as_job else None,
        delivered=[row for row in found.inbox if row.status == "consumed"],
        handlers=[row for row in of_each(view.operator, Operator.handlers)[0] if handles(row)],
        fault=fault,
        reason=form.reason,
        key=uuid4().hex,
    )


def _refused(message: MessageView, act: Act, group: str | None) -> str | None:
    """Return why an act can't be done; None if it can."""
    if any(each.adds & states_of(message) for each in act.options):
        return None
    groups = message.actions.get(act.name)
    if groups is None:
        return message.refused.get(act.name) or "nothing that is known of this message allows it"
    if group is not None and groups and group not in groups:
        return f"it can be done for {', '.join(groups)}, but not for group {group!r}"
    return None


# --- many messages -----------------------------------------------------------------------------------------


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
        """Return the targets of the bulk job."""
        if self.named:
            return Selector(targets=tuple(target for target, _ in map(_target, self.named)))
        criteria: Any = read(types_of(self.of)["criteria"], pairs_of(self.filter))
        return Selector(**{self.of: criteria})

    def by_database(self) -> Mapping[str, Sequence[str]]:
        """Return the named rows of each database that has some."""
        found: dict[str, list[str]] = defaultdict(list)
        for text in self.named:
            found[_target(text)[1]].append(text)
        return found


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
    if order.typed != act.number_to_type(order.count):
        return _preview(view, form, order, fault="Nothing was done: to go on, type the number as it stands there.")
    return _start(view, act, form.selector, order, pairs, "start", form.chosen)


@router.get("/bulk-jobs/{bulk_job_id}")
def bulk_job(view: View, bulk_job_id: UUID) -> Response:
    """Show a bulk job, and what became of its items."""
    job = view.operator.bulk_job(bulk_job_id)
    fetch = view.operator.bulk_items
    items = Listing(view, model.BulkItemFilter, lambda found, page: fetch(job.id, page, state=found.state))
    return view.page(
        "bulk_job.html",
        bulk_job=job,
        list=items,
        states=list(model.BulkItemState),
        outcome=view.operator.bulk_outcome(job.id),
        may_cancel=job.finished_at is None and view.context.may(CANCEL),
    )


@router.get("/bulk-jobs/{bulk_job_id}/cancel", dependencies=[requires(CANCEL)])
def confirm_cancel(view: View, bulk_job_id: UUID) -> Response:
    """Show what cancelling would leave undone, with the form that does it."""
    return view.page("cancel.html", bulk_job=view.operator.bulk_job(bulk_job_id))


@router.post("/bulk-jobs/{bulk_job_id}/cancel", dependencies=[requires(CANCEL)])
def cancel(view: View, bulk_job_id: UUID, pairs: FormPairs) -> Response:
    """Cancel the open items of a bulk job."""
    view.operator.cancel(bulk_job_id, by=view.context.actor, why=read(OrderForm, pairs).reason)
    return view.done("cancel", "bulk-jobs", bulk_job_id)


def _preview(view: PageView, form: BulkForm, order: OrderForm = OrderForm(), *, fault: str = "") -> Response:
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
    eligible = replace(preview.matched, value=preview.eligible)
    shown: dict[str, Any] = {"form": form, "order": order, "preview": preview, "eligible": eligible, "fault": fault}
    return view.page("bulk.html", 422 if fault else 200, act=act, key=uuid4().hex, **shown)


def _target(text: str) -> tuple[Target, str]:
    message, _, rest = text.partition("/")
    group, _, database = rest.partition("/")
    try:
        return Target(UUID(message), group or None), database
    except ValueError:
        raise InvalidRequest(f"target {text[:80]!r} must be id/group/database", "target") from None
