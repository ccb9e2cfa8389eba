"""Endpoints of sagas: flows, one with its commands; and answers for participants."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from fastapi import APIRouter

from outbox.console.api.acts import ActSentence, ReasonBody, declared
from outbox.console.api.requests import Listed, PageQuery, from_body, from_query, problems
from outbox.console.context import API, Context
from outbox.flow.saga import CommandAnswer
from outbox.flow.views import LONGEST_RESULT, FlowFilter, FlowRow, FlowView
from outbox.operator.acts import ANSWER
from outbox.operator.model import Page
from outbox.reader import option

router: APIRouter = APIRouter(prefix=f"{API}/sagas", responses=problems(), tags=["sagas"])


@router.get("")
def flows(context: Context, query: Listed[FlowFilter] = from_query(FlowFilter, PageQuery)) -> Page[FlowRow]:
    """Return the flows of sagas that match, the newest first."""
    return context.sagas.flows(*query)


@router.get("/{flow_id}", responses=problems(404))
def flow(context: Context, flow_id: UUID) -> FlowView:
    """Return a flow, and the commands that it has sent."""
    return context.sagas.flow(flow_id)


@dataclass(frozen=True, kw_only=True)
class AnswerBody(ReasonBody):
    """Take the answer for a participant."""

    answer: CommandAnswer = option(help="What it did.")
    result: str | None = option(None, "The participant's reply, as JSON in a text.", most=LONGEST_RESULT)


@router.post("/commands/{message_id}/answer", **declared(ANSWER, 404, 409, 415))
def answer(context: Context, message_id: UUID, body: AnswerBody = from_body(AnswerBody)) -> ActSentence:
    """Answer a command."""
    outcome = context.sagas.answer(message_id, body.answer, by=context.actor, why=body.reason, result=body.result)
    return ActSentence(outcome)
