"""The page that asks before an act on what isn't a message, and the groups, with the topics that are paused.

The page is made of the act's row (`outbox.operator.whole_acts`). Where a preview depends on what is asked for, that is
asked first; then the page shows what the act would do, and asks for the rest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fastapi import APIRouter, Response

from outbox.console.api.lists import of_each
from outbox.console.context import requires
from outbox.console.pages.lists import FormPairs, Pairs, listing_of, pairs_of, read
from outbox.console.pages.view import PageView, View
from outbox.console.problems import as_problem
from outbox.errors import ActRefused, InvalidMessage, InvalidRequest, NotFound
from outbox.operator.health.overview import MOST_ROWS
from outbox.operator.operator import Operator
from outbox.operator.whole_acts import DATABASE_FIELDS, WHOLE_ACTS, WholeAct, facts_of, form_of
from outbox.reader import option, shape_of

router: APIRouter = APIRouter(include_in_schema=False)

#: Texts that can be longer than this have more than a line.
_LINE = 500
#: The fields that limit an act, and what is told of a target as it is now.
_LIMITS = {*DATABASE_FIELDS, "topic"}
_ABOUT = ("group", "topic", "error_kind")


@dataclass(frozen=True, slots=True)
class ActForm:
    """What the form before every act sends beside its fields.

    ``typed`` is what has to be typed where it can't be taken back; ``fixed`` names the fields that the link to
    the form had given.
    """

    reason: str = option("", most=4000)
    typed: str = option("", most=1000)
    fixed: str = option("", most=1000)


@router.get("/groups")
def groups(view: View) -> Response:
    """Show the groups, and the topics whose dispatch is paused."""
    pauses, unreached = of_each(view.operator, Operator.topic_pauses)
    found = listing_of(view, "groups", view.operator.groups(), unreached)
    return view.page("groups.html", found.status, list=found, pauses=pauses, most=MOST_ROWS)


def _add(act: WholeAct) -> None:
    """Add the page of an act."""

    def confirm(view: View) -> Response:
        pairs = pairs_of(view.request.url.query)
        return _ask(view, act, pairs, {each for each, _ in pairs})

    def do(view: View, pairs: FormPairs) -> Response:
        order = read(ActForm, pairs)
        try:
            values = asdict(read(form_of(act), pairs))
            if order.typed != act.to_type(values):
                raise InvalidRequest(f"nothing was done: to go on, type {act.to_type(values)!r}", "typed")
            act.perform(view.operator, values, by=view.context.actor, why=order.reason)
        except (InvalidRequest, InvalidMessage, NotFound, ActRefused) as error:
            problem = as_problem(error)
            status = problem.status_code if problem else 422
            return _ask(view, act, pairs, set(order.fixed.split(",")), fault=str(error), status=status)
        return view.done(act.name, act.page)

    for endpoint, method in ((confirm, "GET"), (do, "POST")):
        dependencies = [requires(act.permission)]
        router.add_api_route(f"/acts/{act.name}", endpoint, methods=[method], dependencies=dependencies)


def _ask(
    view: PageView, act: WholeAct, pairs: Pairs, fixed: set[str], *, fault: str = "", status: int = 422
) -> Response:
    operator, shapes = view.operator, shape_of(form_of(act))
    texts = dict(pairs)
    taken = act.taken(operator, act.preview) if act.preview else []
    inputs = [each for each in taken if each not in {*act.names, *DATABASE_FIELDS}]
    complete = all(texts.get(name) for name in act.names)
    first = bool(act.preview) and not (complete and (not inputs or any(each in texts for each in inputs)))
    preview = current = None
    if not first and complete:
        try:
            values = asdict(read(form_of(act), pairs))
            preview = act.look(operator, act.preview, values) if act.preview else None
            current = act.look(operator, act.current, values) if act.current else None
        except InvalidRequest as error:
            if not (act.preview or fault):
                raise
            # What can't be is asked for again, also where the link had it.
            first, fault = bool(act.preview), fault or str(error)
            fixed = fixed - {*inputs, *DATABASE_FIELDS, error.field}
    facts, rows = facts_of(preview) if preview is not None else ({}, {})
    preview_names = {*inputs, "source"} if act.preview and not first else set()
    hidden = {each.name: texts[each.name] for each in shapes if each.name in (fixed | preview_names) & texts.keys()}
    if preview is not None:
        values = act.with_databases(values, preview)
        hidden |= {name: values[name] for name in DATABASE_FIELDS if values.get(name)}
    shown = [
        each
        for each in shapes
        if each.name not in hidden.keys() | preview_names
        and (each.name in taken or not first)
        and (len(operator.databases) > 1 or each.name not in DATABASE_FIELDS)
    ]
    # A field that was emptied stays so; a topic, or a database, limits the act.
    before = {
        each.name: texts.get(each.name, "" if fault or each.name in _LIMITS else _now(current, each.name))
        for each in shown
    }
    about = {name.replace("_", " "): getattr(current, name) for name in _ABOUT if hasattr(current, name)}
    return view.page(
        "act.html",
        status if fault else 200,
        act=act,
        title=f"{act.button} {act.named(texts) if complete else 'a ' + act.names[-1]}",
        first=first,
        fault=fault,
        facts=hidden | about | facts,
        rows=rows,
        refusal=getattr(preview, "refusal", ""),
        hidden=hidden,
        shown=shown,
        before=before,
        line=_LINE,
        to_type=act.to_type(texts) if complete and not first else "",
        reason=texts.get("reason", ""),
    )


def _now(current: Any, name: str) -> str:
    """Return a field as it is now, as it is written; empty where that isn't known."""
    return str(getattr(current, f"{name}_text", None) or getattr(current, name, None) or "")


for _act in WHOLE_ACTS.values():
    _add(_act)
