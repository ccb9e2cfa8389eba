"""The page of a message, the pages (or dialogs) that ask before an act, bulk jobs, and the groups.

The page before an act that asks for more than a yes is made of the act's row (`outbox.acts.whole_acts`). Where a
preview depends on what is asked for, that is asked first; then the page shows what the act would do, and asks for the
rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlencode
from uuid import UUID, uuid4

from fastapi import APIRouter, Query, Response

from outbox.acts.changes import Act, Actor, Target
from outbox.acts.messages import ACTS, act_named
from outbox.acts.whole_acts import DATABASE_FIELDS, PINNED, WHOLE_ACTS, WholeAct, facts_of, form_of, with_fields
from outbox.console.api.acts import JobBody, needs_of, order_job, part_of
from outbox.console.api.lists import of_each, types_of
from outbox.console.auth import only_reads
from outbox.console.context import CANCEL, REVEAL, requires
from outbox.console.pages.lists import FormPairs, Listing, Pairs, listing_of, names_of, options_of, pairs_of, read
from outbox.console.pages.overview import Diagram
from outbox.console.pages.view import PageView, View
from outbox.console.problems import as_problem
from outbox.errors import ActRefused, InvalidMessage, InvalidRequest, NotFound, VersionMismatch
from outbox.message.model import Status
from outbox.operator import model
from outbox.operator.health.overview import MOST_ROWS
from outbox.operator.health.workers import HandlerRow
from outbox.operator.model import MessageView, Selector
from outbox.operator.operator import Operator
from outbox.reader import FieldShape, option, shape_of

router: APIRouter = APIRouter(include_in_schema=False)


@dataclass(frozen=True, kw_only=True)
class OrderForm(JobBody):
    """Take the form before an act, beside the act's options.

    Before a bulk job that can't be taken back, or reaches far, ``typed`` must be ``count``; before one that can't, of
    one message, its key.
    """

    version: str | None = option(None)
    group: str | None = option(None)
    rate: float | None = option(None, above=0, most=1e6)
    key: str | None = option(None)
    typed: str = option("")
    count: int = option(0, least=0)


def _start(
    view: PageView, act: Act, selector: Selector, form: OrderForm, pairs: FormPairs, code: str, database: str | None
) -> Response:
    """Order a bulk job, and lead to its page."""
    order = replace(form, database=database)
    job = order_job(view.context, form.key, act.name, selector, order, options_of(act, pairs), form.rate)
    return view.done(code, "bulk-jobs", job.id)


# --- one message -------------------------------------------------------------------------------------------


@router.get("/messages/{message_id}")
def message(view: View, message_id: UUID) -> Response:
    """Show a message."""
    return _message_page(view, message_id)


@router.get("/messages/{message_id}/conversation")
def conversation(view: View, message_id: UUID, page: Annotated[int, Query(ge=1)] = 1) -> Response:
    """Show the conversation of a message as a sequence diagram, and as a table; some steps at a time."""
    found = view.operator.conversation(message_id)
    return view.page("conversation.html", view=found, diagram=Diagram(found, page))


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
    items = Listing(view, model.BulkItemFilter, partial(view.operator.bulk_items, job.id))
    outcome = view.operator.bulk_outcome(job.id)
    return view.page(
        "bulk_job.html",
        bulk_job=job,
        list=items,
        states=list(model.BulkItemState),
        outcome=outcome,
        verdict=outcome.verdict_of(job),
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


#: Texts that can be longer than this have more than a line.
_LINE = 500
#: The fields that limit an act, and what is about_hidden of a target as it is now.
_LIMITS = {*DATABASE_FIELDS, "topic"}
_ABOUT = ("group", "topic", "error_kind")


@dataclass(frozen=True, slots=True)
class ActForm:
    """What the form before every act sends beside its fields.

    ``typed`` is what has to be typed where it can't be taken back; ``fixed`` names the fields that the link to
    the form had known. ``key`` makes a repeated order the same bulk job.
    """

    reason: str = option("", most=4000)
    typed: str = option("", most=1000)
    fixed: str = option("", most=1000)
    key: str = option("", most=200)


@dataclass(frozen=True, slots=True)
class ActQuestion:
    """One step before an act: what is known of it, what is asked, and what the act would do.

    ``pairs`` are the fields that a link or a form has, ``fixed`` the names of those that can't be changed there.
    ``preview`` and ``current`` are what the operator's methods of these names told; without the preview that the act
    has, it is the ``first`` step, which asks for what the preview depends on.
    """

    act: WholeAct
    pairs: Pairs
    fixed: AbstractSet[str]
    several: bool
    fault: str = ""
    preview: Any = None
    current: Any = None

    @property
    def texts(self) -> dict[str, str]:
        """The fields as they are written."""
        return dict(self.pairs)

    @property
    def taken(self) -> list[str]:
        """What the preview depends on."""
        return self.act.taken(part_of(self.act), self.act.preview) if self.act.preview else []

    @property
    def inputs(self) -> list[str]:
        """What of that is asked."""
        return [each for each in self.taken if each not in {*self.act.names, *DATABASE_FIELDS, *self.act.linked}]

    @property
    def complete(self) -> bool:
        """Is the target known?"""
        return all(self.texts.get(name) for name in self.act.names)

    @property
    def answered(self) -> bool:
        """Is all known that the preview depends on?"""
        return self.complete and (not self.inputs or any(each in self.texts for each in self.inputs))

    @property
    def first(self) -> bool:
        """Is this the step that leads to the preview?"""
        return bool(self.act.preview) and self.preview is None

    @property
    def hidden(self) -> dict[str, str]:
        """What isn't asked here, since it is fixed, or the preview was made of it."""
        names = self.fixed | {*(() if self.preview is None else (*self.inputs, "source"))}
        found = {each.name: self.texts[each.name] for each in self.shapes if each.name in names & self.texts.keys()}
        pins = {each.name: getattr(self.preview, each.name, None) for each in self.shapes if each.name in PINNED}
        return found | {name: str(pin) for name, pin in pins.items() if pin}

    @property
    def hidden_fields(self) -> Pairs:
        """The hidden fields of the form; a name may come several times."""
        pins = [(name, text) for name, text in self.hidden.items() if name in PINNED]
        return [(name, text) for name, text in self.pairs if name in self.hidden.keys() - {*PINNED}] + pins

    @property
    def shapes(self) -> tuple[FieldShape, ...]:
        """The fields of the act."""
        return shape_of(form_of(self.act))

    @property
    def shown(self) -> list[FieldShape]:
        """The fields that are asked for in this step."""
        known = {*self.hidden, *PINNED[2:], *self.act.linked, *(() if self.several else DATABASE_FIELDS)}
        known |= {*(() if self.preview is None else (*self.inputs, "source"))}
        return [each for each in self.shapes if each.name not in known and (each.name in self.taken or not self.first)]

    @property
    def before(self) -> dict[str, str]:
        """What stands in the fields. One that was emptied stays so; a topic, or a database, limits the act."""
        now = None if self.fault else self.current
        names = [each.name for each in self.shown]
        return {name: self.texts.get(name, "" if name in _LIMITS else _now(now, name)) for name in names}

    @property
    def facts(self) -> dict[str, str]:
        """What is known, by its name."""
        about = {name.replace("_", " "): getattr(self.current, name) for name in _ABOUT if hasattr(self.current, name)}
        about_hidden = {name: text for name, text in self.hidden.items() if name not in PINNED[2:]}
        return about_hidden | about | ({} if self.preview is None else facts_of(self.preview)[0])

    @property
    def rows(self) -> dict[str, list[Any]]:
        """The tables of the preview."""
        return {} if self.preview is None else facts_of(self.preview)[1]

    @property
    def title(self) -> str:
        """What is asked."""
        what = self.act.named(self.texts) if self.complete else f"a {self.act.names[-1].removesuffix('_id')}"
        return f"{self.act.button_for(self.texts)} {what}"

    @property
    def to_type(self) -> str:
        """What has to be typed to go on."""
        return self.act.to_type(self.texts, self.preview) if self.complete and not self.first else ""

    @property
    def back(self) -> list[str]:
        """Where the target is."""
        return self.act.at(self.act.page, self.texts, self.preview)


@router.get("/groups")
def groups(view: View) -> Response:
    """Show the groups, and the topics whose dispatch is paused."""
    pauses, unreached = of_each(view.operator, Operator.topic_pauses)
    found = listing_of(view, "groups", view.operator.groups(), unreached)
    return view.page("groups.html", found.status, list=found, pauses=pauses, most=MOST_ROWS)


def _add(act: WholeAct) -> None:
    """Add the page of an act; what it shows of a ``secret`` one is recorded, so that it is no link."""

    def confirm(view: View) -> Response:
        pairs = pairs_of(view.request.url.query)
        if moment := dict(pairs).get("moment"):
            pairs = [pair for pair in pairs if pair[0] not in {"to", "moment"}] + [("to", f"{moment}Z")]
        # A moment can be picked again, and what goes with it.
        again = names_of(act.fields) if act.moments else set()
        return _ask_whole(view, act, pairs, {each for each, _ in pairs} - again)

    def confirm_by_form(view: View, pairs: FormPairs) -> Response:
        return _ask_whole(view, act, pairs, {each for each, _ in pairs})

    def do(view: View, pairs: FormPairs) -> Response:
        order, part = read(ActForm, pairs), getattr(view.context, act.of)
        try:
            values = asdict(read(form_of(act), pairs))
            if (missing := act.left_to_type(part, values, order.typed)) is not None:
                raise InvalidRequest(f"nothing was done: to go on, type {missing!r}", "typed")
            if "idempotency_key" in act.taken(part, act.method or act.name):
                values["idempotency_key"] = order.key and f"{view.context.principal.id}:{order.key}"
            done = act.perform(part, values, by=view.context.actor, why=order.reason)
        except (InvalidRequest, InvalidMessage, NotFound, ActRefused) as error:
            problem = as_problem(error)
            status = problem.status_code if problem else 422
            fixed, fault = set(order.fixed.split(",")), view.operator.shown(str(error))
            return _ask_whole(view, act, pairs, fixed, fault=fault, status=status)
        count = str(done).partition(" ")[0]
        return view.done(act.name, *act.at(act.leads or act.page, values, done), count=count)

    question = (
        (f"/acts/{act.name}/ask", confirm_by_form, "POST") if act.secret else (f"/acts/{act.name}", confirm, "GET")
    )
    for path, endpoint, method in (question, (f"/acts/{act.name}", do, "POST")):
        router.add_api_route(path, endpoint, methods=[method], dependencies=[requires(each) for each in needs_of(act)])


def _ask_whole(
    view: PageView, act: WholeAct, pairs: Pairs, fixed: set[str], *, fault: str = "", status: int = 422
) -> Response:
    question = ActQuestion(act, pairs, fixed, len(view.operator.databases) > 1, fault)
    if question.answered or (question.complete and not act.preview):
        part = getattr(view.context, act.of)
        try:
            known = {each.name for each in question.shapes if each.name in question.texts}
            names = frozenset({*known, *question.taken, *(act.taken(part, act.current) if act.current else ())})
            values = asdict(read(with_fields(form_of(act), act.name, names), pairs)) | {"by": view.context.actor}
            preview = act.look(part, act.preview, values) if act.preview else None
            # What was typed isn't read anew, and recorded.
            has_current = act.current and not (act.secret and fault) and not getattr(preview, "refusal", "")
            question = replace(
                question, preview=preview, current=act.look(part, act.current, values) if has_current else None
            )
        except InvalidRequest as error:
            if not (act.preview or fault):
                raise
            # What can't be is asked for again, also where the link had it.
            again = {*question.inputs, *DATABASE_FIELDS, error.field}
            question = replace(question, fault=fault or view.operator.shown(str(error)), fixed=question.fixed - again)
    refusal, key = getattr(question.preview, "refusal", ""), read(ActForm, pairs).key or uuid4().hex
    more = {"refusal": refusal, "line": _LINE, "reason": question.texts.get("reason", ""), "key": key}
    return view.page("act.html", status if question.fault else 200, act=act, question=question, **more)


def _now(current: Any, name: str) -> str:
    """Return a field as it is now, as it is written; empty where that isn't known."""
    return str(getattr(current, f"{name}_text", None) or getattr(current, name, None) or "")


for _act in WHOLE_ACTS.values():
    _add(_act)
