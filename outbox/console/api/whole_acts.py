"""Endpoints of acts that ask for more than a yes, and of what each would do: made of `outbox.acts.whole_acts`."""

from __future__ import annotations

from dataclasses import asdict
from inspect import Parameter, Signature
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response

from outbox.acts.whole_acts import PARTS, WHOLE_ACTS, WholeAct, returned, with_fields
from outbox.console.api.acts import ActSentence, ReasonBody, declared
from outbox.console.api.requests import IdempotencyKey, IfMatch, from_body, from_query, problems
from outbox.console.context import API, REVEAL, Context, RequestContext, requires
from outbox.reader import shape_of

router: APIRouter = APIRouter(prefix=API, responses=problems())


def part_of(act: WholeAct) -> Any:
    """Return the class that has the methods of an act."""
    return returned(getattr(RequestContext, act.of).fget)


def needs_of(act: WholeAct) -> list[str]:
    """Return the permissions that an act takes; what differs between two bodies tells of masked values."""
    return [act.permission, *([REVEAL] if act.secret else ())]


def _add(act: WholeAct, endpoint: Any, fields: Any, headers: dict[str, Any], **more: Any) -> None:
    """Add an endpoint at the act's address, whose parameters are the parts of the target, ``fields`` and headers."""
    hints: dict[str, Any] = {"context": Context, "response": Response, **headers}
    for name in act.names:
        part = PARTS[name]
        hints[name] = Annotated[part.kind, Path(max_length=part.most, pattern=part.pattern, description=part.help)]
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY, annotation=hint) for name, hint in hints.items()]
    parameters.append(Parameter("fields", Parameter.KEYWORD_ONLY, annotation=Any, default=fields))
    endpoint.__signature__ = Signature(parameters)  # what FastAPI reads
    router.add_api_route(act.path, endpoint, tags=[f"acts on {act.noun}"], **more)


def _add_act(act: WholeAct) -> None:
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
    _add(act, do, from_body(body), headers, methods=["POST"], name=act.name, **more)


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
    _add(act, look, from_query(names), {}, name=f"preview_{act.name}", **more)


for _act in WHOLE_ACTS.values():
    if _act.preview:
        _add_preview(_act)
    _add_act(_act)
