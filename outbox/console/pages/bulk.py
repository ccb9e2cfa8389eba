"""One action on many messages: a preview with numbers and a sample, and the form that orders the operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData

from outbox.console.pages import fields
from outbox.console.pages.fields import Fields
from outbox.console.pages.words import ACTS
from outbox.console.routing import only_reads
from outbox.errors import InvalidRequest
from outbox.operator.model import Action, Selector, Target

if TYPE_CHECKING:
    from outbox.console.pages.view import View


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for: an action on the named targets, or on all that a filter of a list fits.

    ``targets`` are as the checkboxes name them: id, group and database, with ``/`` between them.
    """

    action: Action
    of: str
    filter: str
    targets: tuple[str, ...]
    database: str | None

    @classmethod
    def read(cls, given: Fields) -> Order:
        """Return what a form asks for.

        Raises:
            InvalidRequest: no such action or list, or nothing was selected.
        """
        action, of = given.text("action") or "", given.text("of") or ""
        if action not in set(Action):
            raise InvalidRequest(f"action {action!r} must be one of: {', '.join(Action)}", "action")
        if of not in {"messages", "inbox", "halves"}:
            raise InvalidRequest(f"of {of!r} must be messages, inbox or halves", "of")
        targets = () if given.text("all") else given.texts("target")
        if not targets and not given.text("all"):
            raise InvalidRequest("no row is selected; select some, or all that the filter fits", "target")
        return cls(Action(action), of, _filter(given), targets, given.text("in"))

    @property
    def selector(self) -> Selector:
        """What the operation acts on.

        Raises:
            InvalidRequest: a target or a filter that isn't one.
        """
        if self.targets:
            return Selector(targets=tuple(target for target, _ in map(_target, self.targets)))
        wanted = Fields.of_query(self.filter)
        match self.of:
            case "inbox":
                return Selector(inbox=fields.inbox_filter(wanted))
            case "halves":
                return Selector(halves=fields.half_filter(wanted))
            case _:
                return Selector(messages=fields.message_filter(wanted))

    def within(self, database: str) -> Order:
        """Return what of it is in a database."""
        return replace(self, targets=tuple(self.by_database().get(database, ())), database=database)

    def by_database(self) -> Mapping[str, Sequence[str]]:
        """Return the targets of each database that has some."""
        found: dict[str, list[str]] = defaultdict(list)
        for text in self.targets:
            found[_target(text)[1]].append(text)
        return found


def add_routes(router: APIRouter, view: View) -> None:
    """Add the preview of an operation, and its order."""
    console = view.console

    @router.get("/bulk")
    def of_filter(request: Request) -> Response:
        given = Fields.of_query(request.url.query)
        return _preview(view, request, Order.read(Fields([*given.pairs(), ("all", "1")])))

    @router.post("/bulk")
    @only_reads
    async def of_selection(request: Request) -> Response:
        order = Order.read(_form(await request.form()))
        return await run_in_threadpool(_preview, view, request, order)

    @router.post("/bulk/start")
    async def start(request: Request) -> Response:
        given = _form(await request.form())
        order = Order.read(given)
        console.demand(request, order.action)
        rollback = order.action is Action.ROLLBACK
        if rollback and given.text("typed") != given.text("count"):
            raise InvalidRequest("to go on, type the number of messages as it stands there", "typed")

        def ordered() -> UUID:
            return console.admin.start(
                order.action,
                order.selector,
                actor=console.actor_of(request),
                reason=given.text("reason") or "",
                token=given.text("token"),
                database=order.database,
                options={"acknowledge_delivered": True} if rollback and given.text("acknowledged") else {},
                rate=given.number("rate"),
                idempotency_key=given.text("key"),
            ).id

        operation = await run_in_threadpool(ordered)
        view.badges.forget()
        return RedirectResponse(console.path(request, "operations", operation, did="start"), 303)


def _preview(view: View, request: Request, order: Order) -> Response:
    view.console.demand(request, order.action)
    admin, databases = view.console.admin, order.by_database()
    if order.targets:
        if order.database is None and len(databases) > 1:
            return _choose(view, request, order, databases)
        order = order.within(order.database or next(iter(databases)))
    try:
        preview = admin.preview(order.action, order.selector, database=order.database)
    except InvalidRequest as error:
        if error.field != "database" or order.database is not None:
            raise
        having = admin.databases.having(order.action.part)
        return _choose(view, request, order, {database.name: [] for database in having})
    return view.page(request, "bulk.html", order=order, preview=preview, act=ACTS[order.action], key=uuid4().hex)


def _choose(view: View, request: Request, order: Order, databases: Mapping[str, Sequence[str]]) -> Response:
    return view.page(request, "choose.html", order=order, databases=databases, act=ACTS[order.action])


def _form(form: FormData) -> Fields:
    return Fields([(name, value) for name, value in form.multi_items() if isinstance(value, str)])


def _filter(given: Fields) -> str:
    """Return the filter: as a query in one field, or the fields themselves."""
    query = given.text("filter")
    own = {"action", "of", "all", "target", "filter", "in"}
    return query or Fields([pair for pair in given.pairs() if pair[0] not in own]).query()


def _target(text: str) -> tuple[Target, str]:
    message, _, rest = text.partition("/")
    group, _, database = rest.partition("/")
    try:
        return Target(UUID(message), group or None), database
    except ValueError:
        raise InvalidRequest(f"target {text[:80]!r} must be id/group/database", "target") from None
