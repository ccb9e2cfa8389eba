"""Endpoints of the acts on what isn't a message, and of what each would do: made of `outbox.operator.whole_acts`."""

from __future__ import annotations

from dataclasses import asdict, make_dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any

from fastapi import APIRouter, Path

from outbox.console.api.acts import ActSentence, ReasonBody, declared
from outbox.console.api.requests import from_body, from_query, problems
from outbox.console.context import API, Context, requires
from outbox.operator.operator import Operator
from outbox.operator.whole_acts import PARTS, WHOLE_ACTS, WholeAct
from outbox.reader import shape_of

router: APIRouter = APIRouter(prefix=API, responses=problems())


def _add(act: WholeAct, endpoint: Any, fields: Any, **more: Any) -> None:
    """Add an endpoint at the act's address, whose parameters are the parts of the target and ``fields``."""
    parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=Context)]
    for name in act.names:
        help_, pattern, most = PARTS[name]
        hint = Annotated[str, Path(max_length=most, pattern=pattern, description=help_)]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, annotation=hint))
    parameters.append(Parameter("fields", Parameter.KEYWORD_ONLY, annotation=Any, default=fields))
    endpoint.__signature__ = Signature(parameters)  # what FastAPI reads
    router.add_api_route(act.path, endpoint, tags=[f"acts on {act.noun}"], **more)


def _add_act(act: WholeAct) -> None:
    def do(context: Context, fields: Any, **names: str) -> ActSentence:
        values = names | asdict(fields)
        why = values.pop("reason")
        return ActSentence(act.perform(context.operator, values, by=context.actor, why=why))

    name = "".join(map(str.title, act.name.split("_")))
    body = make_dataclass(
        f"{name}Body", [], bases=(ReasonBody, act.fields), frozen=True, kw_only=True, namespace={"__doc__": act.summary}
    )
    more = declared(act, 404, 409, 415)
    _add(act, do, from_body(body), response_model=ActSentence, methods=["POST"], name=act.name, **more)


def _add_preview(act: WholeAct) -> None:
    method, taken = getattr(Operator, act.preview), act.taken(Operator, act.preview)
    without = tuple(each.name for each in shape_of(act.fields) if each.name not in taken)

    def look(context: Context, fields: Any, **names: str) -> Any:
        return act.look(context.operator, act.preview, names | asdict(fields))

    more: dict[str, Any] = {
        "description": f"Return what this would do, and write nothing: {act.summary[:1].lower()}{act.summary[1:]}.",
        # It counts for long, so that it needs what the act needs.
        "dependencies": [requires(act.permission)],
        "responses": problems(404, 409),
        "response_model": method.__globals__[method.__annotations__["return"]],
    }
    _add(act, look, from_query(act.fields, without=without), name=f"preview_{act.name}", **more)


for _act in WHOLE_ACTS.values():
    if _act.preview:
        _add_preview(_act)
    _add_act(_act)
