"""The pages of sagas: the flows, one with its commands, and the question before an operator answers."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from fastapi import APIRouter, Response

from outbox.console.context import requires
from outbox.console.pages.lists import FormPairs, Listing, read
from outbox.console.pages.view import PageView, View
from outbox.errors import ActRefused, InvalidRequest
from outbox.flow.saga import SagaStatus
from outbox.flow.views import LONGEST_RESULT, FlowFilter
from outbox.operator.acts import ANSWER
from outbox.reader import option

router: APIRouter = APIRouter(prefix="/sagas", include_in_schema=False)


@router.get("")
def flows(view: View) -> Response:
    """Show the flows."""
    found = Listing(view, FlowFilter, view.context.sagas.flows, tabs={"overdue", "open"})
    return view.page("sagas.html", found.status, list=found, statuses=list(SagaStatus))


@router.get("/{flow_id}")
def flow(view: View, flow_id: UUID) -> Response:
    """Show a flow with its commands."""
    return view.page("saga.html", view=view.context.sagas.flow(flow_id), act=ANSWER)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Take the form with an answer."""

    answer: str = option("")
    result: str | None = option(None, most=LONGEST_RESULT)
    reason: str = option("", most=4000)


@router.get("/{flow_id}/commands/{message_id}/answer", dependencies=[requires(ANSWER.permission)])
def confirm_answer(view: View, flow_id: UUID, message_id: UUID) -> Response:
    """Show the form with which an operator answers for a participant."""
    return _answer_page(view, flow_id, message_id, AnswerForm())


@router.post("/{flow_id}/commands/{message_id}/answer", dependencies=[requires(ANSWER.permission)])
def answer(view: View, flow_id: UUID, message_id: UUID, pairs: FormPairs) -> Response:
    """Answer for a participant."""
    form = read(AnswerForm, pairs)
    sagas, by = view.context.sagas, view.context.actor
    try:
        sagas.answer(message_id, form.answer, by=by, why=form.reason, result=form.result)
    except InvalidRequest as error:
        if error.field != "result":
            raise
        return _answer_page(view, flow_id, message_id, form, fault=str(error))
    return view.done(ANSWER.name, "sagas", flow_id)


def _answer_page(
    view: PageView, flow_id: UUID, message_id: UUID, form: AnswerForm, *, fault: str | None = None
) -> Response:
    found = view.context.sagas.flow(flow_id)
    command = next((each for each in found.commands if each.message_id == message_id and each.answers), None)
    if command is None:
        raise ActRefused(f"flow {flow_id} waits for no answer to message {message_id} any more; look at it again")
    status = 422 if fault else 200
    return view.page("answer.html", status, view=found, command=command, act=ANSWER, form=form, fault=fault)
