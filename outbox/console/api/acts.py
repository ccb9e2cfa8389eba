"""Endpoints of acts, made of their rows: on one message, on many as bulk jobs, and those that ask for more than a yes.

Acts on messages are rows of `outbox.acts.messages`, all others of `outbox.acts.whole_acts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, make_dataclass
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Response

from outbox.acts.changes import Act, Declaration, Target
from outbox.acts.forms import PARTS
from outbox.acts.messages import ACTS
from outbox.acts.whole_acts import WHOLE_ACTS, WholeAct, returned, with_fields
from outbox.console.api.requests import IdempotencyKey, IfMatch, from_body, from_query, problems, taking
from outbox.console.context import API, CANCEL, REVEAL, Context, RequestContext, requires
from outbox.errors import InvalidRequest, VersionMismatch
from outbox.message.content import GROUP_PATTERN, MAX_GROUP
from outbox.operator import model
from outbox.operator.model import BulkJob, Preview, Selector
from outbox.reader import option, shape_of

router: APIRouter = APIRouter(prefix=API, responses=problems(404, 409, 415))

GroupName = Annotated[str, Path(max_length=MAX_GROUP, pattern=GROUP_PATTERN, description="The group.")]


@dataclass(frozen=True, kw_only=True)
class DatabaseBody:
    """Where something is done."""

    database: str | None = option(None, "The database, where several have the messages.", most=1000)


@dataclass(frozen=True, kw_only=True)
class ReasonBody:
    """Why something is done."""

    reason: str = option("", "Why; the audit records it.", most=2000)


@dataclass(frozen=True, kw_only=True)
class JobBody(DatabaseBody, ReasonBody):
    """What every order of a bulk job has."""

    token: str | None = option(None, "The token of the preview; needed where a filter selects.", most=20_000)


@dataclass(frozen=True, slots=True)
class ActSentence:
    """Tell of an act that was done, in a sentence."""

    outcome: str


def declared(act: Declaration, *statuses: int, needs: Sequence[str] = ()) -> dict[str, Any]:
    """Return how the endpoint of an act is declared; it ``needs`` the act's permission, or these."""
    return {
        "summary": act.summary,
        "description": act.details + (f"\n\nAn example of a reason: {act.why}." if act.why else ""),
        "dependencies": [requires(each) for each in needs or (act.permission,)],
        "responses": problems(*statuses),
    }


def order_job(
    context: RequestContext,
    key: str | None,
    action: str,
    selector: Selector,
    body: DatabaseBody,
    options: Mapping[str, Any],
    rate: float | None = None,
) -> BulkJob:
    """Order a bulk job, with the reason and the token that a body may have."""
    return context.operator.start(
        action,
        selector,
        by=context.actor,
        why=getattr(body, "reason", ""),
        token=getattr(body, "token", None),
        database=body.database,
        options=options,
        rate=rate,
        idempotency_key=key,
    )


def _start(context: RequestContext, response: Response, *order: Any) -> BulkJob:
    """Order a bulk job; a header of the answer says where it is."""
    job = order_job(context, *order)
    response.headers["Location"] = context.url("api", "v1", "bulk-jobs", job.id)
    return job


# --- acts on one message -----------------------------------------------------------------------------------


def _target(message_id: UUID) -> Target:
    return Target(message_id)


def _in_group(group: GroupName, message_id: UUID) -> Target:
    return Target(message_id, group)


def _body_of(act: Act, *bases: type, prefix: str = "") -> Any:
    """Return the body of an endpoint of an act: its options, and the fields of ``bases``."""
    fields: list[Any] = [(each.name, bool, option(False, each.help)) for each in act.options]
    namespace = {"__doc__": act.summary}
    name = f"{prefix}{act.name.title()}Body"
    return from_body(make_dataclass(name, fields, bases=bases, frozen=True, namespace=namespace))


def _options(act: Act, body: Any) -> dict[str, Any]:
    """Return the options of the act that are set."""
    return {each.name: True for each in act.options if getattr(body, each.name)}


def _add(act: Act, endpoint: Callable[..., Any], below: str = "", **more: Any) -> None:
    path = "/inbox/{group}/{message_id}/" if act.noun == "inbox" else "/messages/{message_id}/"
    router.add_api_route(
        path + act.name + below,
        endpoint,
        methods=["POST"],
        tags=[f"acts on {act.noun}"],
        **({"name": act.name} | declared(act, 412) | more),
    )


def _add_act(act: Act) -> None:
    target_of: Any = Depends(_in_group if act.noun == "inbox" else _target)
    body_of = _body_of(act, DatabaseBody, ReasonBody)

    def do(context: Context, version: IfMatch, target: Target = target_of, body: Any = body_of) -> ActSentence:
        outcome = context.operator.act(
            act.name,
            target,
            by=context.actor,
            why=body.reason,
            options=_options(act, body),
            version=version,
            database=body.database,
        )
        return ActSentence(outcome)

    _add(act, do)


def _add_job(act: Act) -> None:
    """Add the endpoints of an act that is a bulk job even for one message."""
    preview_of, order_of = _body_of(act, DatabaseBody, prefix="Preview"), _body_of(act, JobBody)

    def preview(context: Context, message_id: UUID, body: Any = preview_of) -> Preview:
        selector = Selector(targets=(Target(message_id),))
        return context.operator.preview(act.name, selector, database=body.database, options=_options(act, body))

    def order(
        context: Context, response: Response, message_id: UUID, version: IfMatch, key: IdempotencyKey,
        body: Any = order_of,
    ) -> BulkJob:  # fmt: skip
        if version is not None and context.operator.message(message_id).version != version:
            raise VersionMismatch(f"message {message_id} has changed since you read it; read it again, then decide")
        selector = Selector(targets=(Target(message_id),))
        return _start(context, response, key, act.name, selector, body, _options(act, body))

    _add(act, preview, "/preview", name=f"preview_{act.name}", summary=f"Preview: {act.summary}", responses={})
    _add(act, order, status_code=202)


for _row in ACTS.values():
    (_add_job if _row.as_job else _add_act)(_row)


# --- bulk jobs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SelectorBody:
    """Select the targets of a bulk job: exactly one of ``ids`` (of a ``group``), ``targets`` and the filters."""

    ids: tuple[UUID, ...] | None = option(None, "Messages by their ids.")
    group: str | None = option(None, "The group of the ids, for acts on an inbox.", most=1000)
    targets: tuple[Target, ...] | None = option(None, "Messages, each with a group of its own.")
    messages: model.MessageFilter | None = option(None, "The messages that match.")
    inbox: model.InboxFilter | None = option(None, "The inbox rows that match.")
    halves: model.HalfFilter | None = option(None, "The undecided halves that match.")

    def selector(self) -> Selector:
        """Return the selection as the operator takes it."""
        names = [name for name in ("ids", "targets", "messages", "inbox", "halves") if getattr(self, name) is not None]
        if len(names) != 1:
            found = f"it has {', '.join(names)}" if names else "it has none"
            raise InvalidRequest(f"a selector has one of ids, targets, messages, inbox and halves; {found}", "selector")
        if self.group is not None and self.ids is None:
            raise InvalidRequest("group goes with ids; a filter or target has a group of its own", "selector.group")
        targets = tuple(Target(each, self.group) for each in self.ids) if self.ids is not None else self.targets
        if len(targets or ()) > model.MAX_IDS:
            raise InvalidRequest(
                f"a selector names at most {model.MAX_IDS} messages; use a filter", f"selector.{names[0]}"
            )
        return Selector(targets, self.messages, self.inbox, self.halves)


def _action(text: Any) -> str:
    if text not in ACTS:
        raise ValueError(f"one of {', '.join(ACTS)}")
    return str(text)


@dataclass(frozen=True, kw_only=True)
class PreviewBody(DatabaseBody):
    """Tell what a bulk job would do."""

    action: str = option(help=f"The act: {', '.join(ACTS)}.", parse=_action)
    selector: SelectorBody = option(help="What it acts on.")
    options: Mapping[str, Any] = option(help="Options of the act.", factory=dict)


@dataclass(frozen=True, kw_only=True)
class OrderBody(PreviewBody, JobBody):
    """An order of a bulk job."""

    rate: float | None = option(None, "The most items a second.", above=0, most=1e6)


@dataclass(frozen=True, kw_only=True)
class IdsBody(DatabaseBody, ReasonBody):
    """Messages by their ids."""

    ids: tuple[UUID, ...] = option(help="The ids.")
    rate: float | None = option(None, "The most messages a second.", above=0, most=1e6)


@router.post("/bulk-jobs/preview", tags=["bulk jobs"])
def preview_bulk_job(context: Context, body: PreviewBody = from_body(PreviewBody)) -> Preview:
    """Return what a bulk job would do; writes nothing. Its token goes with the order."""
    context.demand(body.action)
    return context.operator.preview(body.action, body.selector.selector(), database=body.database, options=body.options)


@router.post("/bulk-jobs", status_code=202, tags=["bulk jobs"])
def order_bulk_job(
    context: Context, response: Response, key: IdempotencyKey, body: OrderBody = from_body(OrderBody)
) -> BulkJob:
    """Order a bulk job, which workers carry out. The same Idempotency-Key returns the same bulk job."""
    context.demand(body.action)
    return _start(context, response, key, body.action, body.selector.selector(), body, body.options, body.rate)


@router.post("/messages/reSend", status_code=202, dependencies=[requires("resend")], tags=["bulk jobs"])
def resend_by_ids(
    context: Context, response: Response, key: IdempotencyKey, body: IdsBody = from_body(IdsBody)
) -> BulkJob:
    """Order a resend of the messages of these ids: an alias of `POST /bulk-jobs`, without a preview."""
    return _start(context, response, key, "resend", SelectorBody(body.ids).selector(), body, {}, body.rate)


@router.post(
    "/messages/rollback",
    status_code=202,
    dependencies=[requires("rollback"), requires("compensate")],
    tags=["bulk jobs"],
)
def roll_back_by_ids(
    context: Context, response: Response, key: IdempotencyKey, body: IdsBody = from_body(IdsBody)
) -> BulkJob:
    """Order that the local transactions of these ids don't stand: an alias of `POST /bulk-jobs`, without a preview.

    Undecided halves are rolled back; if none of them is undecided, messages are compensated. The answer names the act.
    """
    selector = SelectorBody(body.ids).selector()
    act, found = ACTS["rollback"], context.operator.preview("rollback", selector, database=body.database)
    # Asked once more, it is the same act that was ordered before: what was rolled back counts as undecided.
    is_half = found.eligible or act.refusal("rolled_back") in found.ineligible
    return _start(context, response, key, act.name if is_half else "compensate", selector, body, {}, body.rate)


@router.post("/bulk-jobs/{bulk_job_id}/cancel", dependencies=[requires(CANCEL)], tags=["bulk jobs"])
def cancel_bulk_job(context: Context, bulk_job_id: UUID, body: ReasonBody = from_body(ReasonBody)) -> BulkJob:
    """Cancel the open items of a bulk job; the others stay done."""
    return context.operator.cancel(bulk_job_id, by=context.actor, why=body.reason)


# --- acts that ask for more than a yes ---------------------------------------------------------------------

whole_acts: APIRouter = APIRouter(prefix=API, responses=problems())


def part_of(act: WholeAct) -> Any:
    """Return the class that has the methods of an act."""
    return returned(getattr(RequestContext, act.of).fget)


def needs_of(act: WholeAct) -> list[str]:
    """Return the permissions that an act takes; what differs between two bodies tells of masked values."""
    return [act.permission, *([REVEAL] if act.secret else ())]


def _add_at(act: WholeAct, endpoint: Any, fields: Any, headers: dict[str, Any], **more: Any) -> None:
    """Add an endpoint at the act's address, whose parameters are the parts of the target, ``fields`` and headers."""
    hints: dict[str, Any] = {"context": Context, "response": Response, **headers}
    for name in act.names:
        part = PARTS[name]
        hints[name] = Annotated[part.kind, Path(max_length=part.most, pattern=part.pattern, description=part.help)]
    taking(endpoint, hints, {"fields": fields})
    whole_acts.add_api_route(act.path, endpoint, tags=[f"acts on {act.noun}"], **more)


def _add_whole_act(act: WholeAct) -> None:
    taken = act.taken(part_of(act), act.method or act.name)
    known = {"version": IfMatch, "idempotency_key": IdempotencyKey}
    headers = {name: hint for name, hint in known.items() if name in taken}
    result = returned(getattr(part_of(act), act.method or act.name))

    def do(context: Context, response: Response, fields: Any, **target: Any) -> Any:
        values = asdict(fields) | target
        why = values.pop("reason")
        done = act.perform(getattr(context, act.of), values, by=context.actor, why=why)
        if act.leads:
            response.headers["Location"] = context.url("api", "v1", *act.at(act.leads, done))
        return ActSentence(done) if isinstance(done, str) else done

    name = "".join(map(str.title, act.name.split("_")))
    names = frozenset(each.name for each in shape_of(act.fields) if each.name not in headers)
    body = with_fields(act.fields, f"{name}Body", names, ReasonBody, about=act.summary)
    more: dict[str, Any] = declared(act, 404, 409, *([412] if "version" in headers else ()), 415, needs=needs_of(act))
    more |= {"response_model": ActSentence if result is str else result, "status_code": act.status}
    _add_at(act, do, from_body(body), headers, methods=["POST"], name=act.name, **more)


def _add_preview(act: WholeAct) -> None:
    part = part_of(act)
    names = with_fields(act.fields, f"{act.name}Query", frozenset(act.taken(part, act.preview)))

    def look(context: Context, response: Response, fields: Any, **target: Any) -> Any:  # noqa: ARG001 - as an act's
        return act.look(getattr(context, act.of), act.preview, target | asdict(fields))

    more: dict[str, Any] = {
        "description": f"Return what this would do, and write nothing: {act.summary[:1].lower()}{act.summary[1:]}.",
        # It counts for long, so that it needs what the act needs.
        "dependencies": [requires(each) for each in needs_of(act)],
        "responses": problems(404, 409),
        "response_model": returned(getattr(part, act.preview)),
    }
    _add_at(act, look, from_query(names), {}, name=f"preview_{act.name}", **more)


for _act in WHOLE_ACTS.values():
    if _act.preview:
        _add_preview(_act)
    _add_whole_act(_act)
