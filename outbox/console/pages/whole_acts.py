"""The page before an act that asks for more than a yes, and the groups, with the topics that are paused.

The page is made of the act's row (`outbox.acts.whole_acts`). Where a preview depends on what is asked for, that is
asked first; then the page shows what the act would do, and asks for the rest.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Response

from outbox.acts.whole_acts import DATABASE_FIELDS, PINNED, WHOLE_ACTS, WholeAct, facts_of, form_of, with_fields
from outbox.console.api.lists import of_each
from outbox.console.api.whole_acts import needs_of, part_of
from outbox.console.context import requires
from outbox.console.pages.lists import FormPairs, Pairs, listing_of, pairs_of, read
from outbox.console.pages.view import PageView, View
from outbox.console.problems import as_problem
from outbox.errors import ActRefused, InvalidMessage, InvalidRequest, NotFound
from outbox.operator.health.overview import MOST_ROWS
from outbox.operator.operator import Operator
from outbox.reader import FieldShape, option, shape_of

router: APIRouter = APIRouter(include_in_schema=False)

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
        return self.act.to_type(self.texts) if self.complete and not self.first else ""

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
        return _ask(view, act, pairs, {each for each, _ in pairs})

    def confirm_by_form(view: View, pairs: FormPairs) -> Response:
        return _ask(view, act, pairs, {each for each, _ in pairs})

    def do(view: View, pairs: FormPairs) -> Response:
        order, part = read(ActForm, pairs), getattr(view.context, act.of)
        try:
            values = asdict(read(form_of(act), pairs))
            if order.typed != act.to_type(values):
                raise InvalidRequest(f"nothing was done: to go on, type {act.to_type(values)!r}", "typed")
            if "idempotency_key" in act.taken(part, act.method or act.name):
                values["idempotency_key"] = order.key and f"{view.context.principal.id}:{order.key}"
            done = act.perform(part, values, by=view.context.actor, why=order.reason)
        except (InvalidRequest, InvalidMessage, NotFound, ActRefused) as error:
            problem = as_problem(error)
            status = problem.status_code if problem else 422
            return _ask(view, act, pairs, set(order.fixed.split(",")), fault=str(error), status=status)
        return view.done(act.name, *act.at(act.leads or act.page, values, done))

    question = (
        (f"/acts/{act.name}/ask", confirm_by_form, "POST") if act.secret else (f"/acts/{act.name}", confirm, "GET")
    )
    for path, endpoint, method in (question, (f"/acts/{act.name}", do, "POST")):
        router.add_api_route(path, endpoint, methods=[method], dependencies=[requires(each) for each in needs_of(act)])


def _ask(
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
            question = replace(question, fault=fault or str(error), fixed=question.fixed - again)
    refusal, key = getattr(question.preview, "refusal", ""), read(ActForm, pairs).key or uuid4().hex
    more = {"refusal": refusal, "line": _LINE, "reason": question.texts.get("reason", ""), "key": key}
    return view.page("act.html", status if question.fault else 200, act=act, question=question, **more)


def _now(current: Any, name: str) -> str:
    """Return a field as it is now, as it is written; empty where that isn't known."""
    return str(getattr(current, f"{name}_text", None) or getattr(current, name, None) or "")


for _act in WHOLE_ACTS.values():
    _add(_act)
