"""What operators see of sagas, over all registered databases, and how they answer for a participant that doesn't.

The saga itself is code of the service that owns it, which an operator's process doesn't have. So an operator's answer
is a message to it, like a participant's, in the transaction that records the act: its worker reads it, and goes on.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from uuid import UUID

from outbox.acts.changes import LONGEST, Actor, checked_actor, record_of
from outbox.acts.forms import LONGEST_RESULT
from outbox.acts.whole_acts import ANSWER
from outbox.database.execute import execute
from outbox.errors import ActRefused, InvalidMessage, InvalidRequest, NotFound
from outbox.flow import sql
from outbox.flow.saga import CommandAnswer, CommandKind, SagaCommand, SagaStatus, answer_topic, deadline_topic
from outbox.message.content import CONVERSATION_HEADER, CORRELATION_HEADER, REFUSAL_HEADER, Codecs
from outbox.message.model import HalfMessage, uuid7
from outbox.operator.databases import Database, OverDatabases
from outbox.operator.look.paging import After, Part, SortOrder, checked, page_of
from outbox.operator.model import Page, PageRequest
from outbox.producer.sql import write_halves
from outbox.reader import option

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")

#: How many flows one search looks at.
WINDOW = 2_000
#: The longest reason that stands in an answer.
_LONGEST_REFUSAL = 500


@dataclass(frozen=True, slots=True)
class FlowFilter:
    """Which flows; a field left out fits all. ``overdue``: a participant hasn't answered in time, nor has it since."""

    database: str | None = option(None, "Only of this database.", most=LONGEST, metavar="NAME")
    saga: str | None = option(None, "Only of this saga.", most=LONGEST, metavar="NAME")
    status: tuple[SagaStatus, ...] = option((), "Only flows in this status; may be given again.")
    open: bool = option(False, "Only flows that haven't ended.")
    overdue: bool = option(False, "Only flows that wait for an answer which is overdue.")


@dataclass(frozen=True, slots=True)
class FlowRow:
    """A flow in a list; ``step`` and ``command`` are those of the command that it has sent last.

    ``reason`` is why it is undone. ``overdue_at`` is since when an answer is overdue for which it waits.
    """

    columns: ClassVar[str] = "saga id status step command overdue=overdue_at started=started_at ended=ended_at reason"
    database: str
    id: UUID
    saga: str
    status: SagaStatus
    reason: str | None
    started_at: dt.datetime
    ended_at: dt.datetime | None
    step: str | None
    command: CommandKind | None
    overdue_at: dt.datetime | None


@dataclass(frozen=True, slots=True)
class FlowCommand:
    """A command of a flow, by the id of its message.

    ``deadline_at`` is when it is looked at next, where it isn't answered; ``overdue_at`` when it wasn't answered in
    time. ``reason`` is why it was refused, or can't be delivered. ``answers`` are those that an operator can give.
    """

    message_id: UUID
    number: int
    step: str
    kind: CommandKind
    sent_at: dt.datetime | None
    deadline_at: dt.datetime | None
    overdue_at: dt.datetime | None
    answered_at: dt.datetime | None
    answer: CommandAnswer | None
    reason: str | None
    answers: list[CommandAnswer]


@dataclass(frozen=True, slots=True)
class FlowView:
    """A flow, and the commands that it has sent, in order."""

    flow: FlowRow
    commands: list[FlowCommand]


@dataclass(frozen=True, slots=True)
class CommandPreview:
    """The command that an operator is about to answer."""

    flow: UUID
    saga: str
    step: str
    kind: CommandKind
    answer: CommandAnswer | None

    @property
    def refusal(self) -> str:
        """Why it can't be answered; empty if it can."""
        return _why_not(self.kind, self.answer, CommandAnswer.DONE) or ""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that was given, in a sentence, and the flow that goes on with it."""

    outcome: str
    flow: UUID


_NEWEST: SortOrder[FlowRow] = SortOrder(key=lambda row: (row.id,), shape=(UUID,))


class Sagas(OverDatabases):
    """What an operator sees of sagas, and answers."""

    def flows(self, criteria: FlowFilter, page: PageRequest) -> Page[FlowRow]:
        """Return a page of the flows that fit, the newest first.

        Those that are open or overdue are found by index, all others within a window of each database (`WINDOW` flows).
        """
        checked(criteria)
        fields = {
            "saga": criteria.saga,
            "status": [each.value for each in criteria.status] or None,
            "open": criteria.open or criteria.overdue,
            "overdue": criteria.overdue,
        }

        def read(connection: Connection, database: Database, after: After, limit: int) -> Part[FlowRow]:
            below = after[0] if after else None
            listed = sql.listed_flows(database.schema, **fields, below=below, window=WINDOW, limit=limit)
            return Part.of(execute(connection, listed)[0], 1, lambda row: _flow_row(database, row), WINDOW)

        return self.shown_texts(page_of(self.databases, "producer", criteria, page, _NEWEST, read))

    def flow(self, flow_id: UUID) -> FlowView:
        """Return a flow with its commands.

        Raises:
            NotFound: no registered database has it.
            DatabaseUnreached: none that could be read has.
        """

        def read(database: Database) -> FlowView | None:
            with database.read_only() as connection:
                schema = database.schema
                flows, commands, deadlines = execute(
                    connection,
                    sql.listed_flow(schema, id=flow_id),
                    sql.commands(schema, [flow_id]),
                    sql.deadlines(schema, id=flow_id),
                )
            if not flows:
                return None
            row = _flow_row(database, flows[0])
            due = {command: moment for topic, command, moment in deadlines if topic == deadline_topic(row.saga)}
            return self.shown_texts(FlowView(row, [_command(SagaCommand.of(each[1:]), due) for each in commands]))

        return self._first(f"flow {flow_id}", read)

    def command(self, command: UUID) -> CommandPreview:
        """Return the command of a message, as an answer for its participant meets it.

        Raises:
            NotFound, DatabaseUnreached: as `answer`.
        """

        def read(database: Database) -> CommandPreview | None:
            with database.read_only() as connection:
                (rows,) = execute(connection, sql.commanded(database.schema, command=command))
            for flow, saga, step, kind, answered in rows:
                return CommandPreview(flow, saga, step, CommandKind(kind), answered and CommandAnswer(answered))
            return None

        return self._first(f"command {command}", read)

    def answer(
        self, command: UUID, answer: CommandAnswer | str, *, by: str | Actor, why: str, result: str | None = None
    ) -> Answered:
        """Answer the command of a message for its participant, which doesn't.

        ``done`` with what it should have replied as ``result`` (JSON in a text), for steps that need it; or
        ``refused``. To undo can't be refused. The saga takes it like a participant's: the first one counts, but a step
        that is done after a no is undone.

        Raises:
            NotFound: no registered database has sent such a command.
            DatabaseUnreached: none that could be read has.
            ActRefused: it is answered, or undoes a step and can't be refused.
            InvalidRequest: no reason, another answer, or a result that isn't JSON or goes with a refusal.
        """
        chosen, body = _checked_answer(answer, result)
        actor = checked_actor(ANSWER, by, why)

        def write(database: Database) -> Answered | None:
            with database.acting() as connection:
                (rows,) = execute(connection, sql.commanded(database.schema, command=command))
                if not rows:
                    return None
                flow_id, saga, step, kind, answered = rows[0]
                if (why_not := _why_not(kind, answered, chosen)) is not None:
                    raise ActRefused(f"command {command} can't be answered with {chosen.value}: {why_not}")
                headers = {CONVERSATION_HEADER: str(flow_id), CORRELATION_HEADER: str(command)}
                if chosen is CommandAnswer.REFUSED:
                    headers[REFUSAL_HEADER] = f"{why.strip()} (says {actor.name})"[:_LONGEST_REFUSAL]
                named = saga, answer_topic(saga), str(flow_id), None
                half = HalfMessage(uuid7(), *named, headers, "application/json", body)
                done = {"saga": saga, "flow": str(flow_id), "step": step, "answer": chosen.value}
                schema = database.schema
                record = record_of(schema, ANSWER.name, actor, why, command, done)
                execute(connection, write_halves(schema, [(half, None)]), record)
            outcome = f"the {kind} of step {step}, message {command}, is answered: {chosen.value}"
            return Answered(outcome, flow_id)

        return self._first(f"command {command}", write)

    def _first(self, what: str, find: Callable[[Database], T | None]) -> T:
        missing = (
            f"no registered database ({', '.join(self.databases)}) has {what} of a saga, as far as its workers have "
            "come; is it in another one, or was it pruned?"
        )
        return self.first_of("producer", find, NotFound(missing))


def _flow_row(database: Database, row: Any) -> FlowRow:
    id_, saga, status, reason, started_at, ended_at, step, kind, overdue_at = row
    command = None if kind is None else CommandKind(kind)
    return FlowRow(
        database.name, id_, saga, SagaStatus(status), reason, started_at, ended_at, step, command, overdue_at
    )


def _command(sent: SagaCommand, due: Mapping[str, dt.datetime]) -> FlowCommand:
    able = [each for each in CommandAnswer if _why_not(sent.kind, sent.answer, each) is None]
    deadline_at = None if sent.answer else due.get(str(sent.message_id))
    return FlowCommand(
        *(sent.message_id, sent.number, sent.step, sent.kind, sent.sent_at, deadline_at, sent.overdue_at),
        *(sent.answered_at, sent.answer, sent.reason, able),
    )


def _why_not(kind: str, answered: str | None, answer: CommandAnswer) -> str | None:
    """Return why an operator can't give an answer; None: it is possible."""
    if answered is not None:
        return f"it is answered already: {answered}"
    if kind == CommandKind.COMPENSATION and answer is CommandAnswer.REFUSED:
        return "it undoes a step, which can't be refused; have its group try the message again, or undo it by hand"
    return None


def _checked_answer(answer: str, result: str | None) -> tuple[CommandAnswer, bytes]:
    """Return the answer, and the body of its message."""
    if answer not in set(CommandAnswer):
        raise InvalidRequest(f"answer {answer!r} must be one of: {', '.join(CommandAnswer)}", field="answer")
    chosen, body = CommandAnswer(answer), "{}" if result is None else result
    if chosen is CommandAnswer.REFUSED and result is not None:
        raise InvalidRequest("a result goes with the answer done; leave it out", field="result")
    if len(body) > LONGEST_RESULT:
        raise InvalidRequest(f"the result has {len(body)} characters; {LONGEST_RESULT} are allowed", field="result")
    try:
        # What a participant couldn't send, such as NaN, isn't an answer.
        Codecs().encode(json.loads(body))
        return chosen, body.encode()
    except (ValueError, RecursionError, InvalidMessage) as error:
        raise InvalidRequest(f"the result isn't JSON: {error}", field="result") from None
