"""A saga: one change over several services, each with a database of its own, that is done everywhere or undone.

The service that owns it declares its steps. Each is a command to a participant, which is a plain consumer that answers
by `Message.reply` or `Message.refuse`; and a second command that undoes the first. There is no engine beside the
messages: a saga is a row (``saga``), its commands are rows (``saga_command``), and both change in the transaction of
the message that changes them, with its inbox row and the next command. So each transition happens exactly once, and a
process that is killed anywhere leaves a saga that its next message moves on.

**The messages**, of a saga ``trip`` with a step ``hotel``:

- ``trip.start`` starts it: its id is the saga's, and the conversation's;
- the commands go to the topics of the steps, under the saga's id as their key;
- ``trip.reply.hotel`` are the answers, which the saga reads in the participant's database;
- ``trip.deadline`` is sent with each command, delayed by the time that its participant has;
- ``trip.answer`` are answers that operators give for a participant that doesn't (`outbox.flow.views`).

**What happens.** An answer that says yes sends the next command, or completes the saga. A refusal ends the way forward:
the steps done are undone, the last one first. So does a deadline, but then it isn't known whether the step that hasn't
answered was, or will be, done: it is *in doubt*. The saga undoes the others and waits for its answer. Comes a yes, late
as it is, the step is undone as well; comes a refusal, there is nothing to undo. Only then the saga has ended. So a step
is undone once if it was done, and never if it wasn't, without a participant having to know of it.

Where the saga knows the participant's group, a command that this has parked, or lost for good, is a refusal too: the
duty `confirm` learns of it, and the saga doesn't wait. An operator may yet have it tried again, or a person may answer
late. So a yes to what counts as refused is taken at its word: the step is undone, also where the saga has ended before.

To undo can't be refused. A refusal is told as an error, and the command is sent again, for ever; so is told, again and
again, a command without an answer. An undo that is parked is told as an error, and not sent again: the parked one may
yet be tried, and would undo the step twice. A person finds it in the list of sagas, and the message of the command in
the participant's.

**The races.** All that changes a saga locks its row first, and reads its commands after that: an answer, a deadline and
what `confirm` has learnt come one after the other, and the second sees what the first did. Each command is answered
once; a second answer (of a participant that answers twice) does nothing, unless it says yes after a no.
"""

from __future__ import annotations

import datetime as dt
import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, Unpack
from uuid import UUID

from sqlalchemy import Connection

from outbox.calling.engine import call_with
from outbox.calling.function import CalledFunction, CalledFunctions, check_function
from outbox.database.at_commit import after_commit, at_commit
from outbox.database.execute import Row, execute
from outbox.errors import InvalidHandler
from outbox.flow import sql
from outbox.message.answer import FUNCTION, CalledKind, finished
from outbox.message.content import Codecs, check_group, check_seconds
from outbox.message.ids import derived_id
from outbox.message.model import Delivery, DeliveryStatus, Message, Park, Retry, SendOptions
from outbox.message.topic import Topic
from outbox.telemetry.events import SagaOverdue, StepDoneAfterAll, UndoRefused, UndoUndeliverable
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import Session

    from outbox.app import Outbox
    from outbox.telemetry.hooks import TelemetryEvent

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_UUID_TEXT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: Seconds after which an unanswered command is told again, at the longest.
_DAY = 86400.0
#: Seconds until an undo that was refused is sent again, where the step has no time limit.
_AGAIN = 60.0


def deadline_topic(saga: str) -> str:
    """Return the topic of the messages by which a saga misses answers."""
    return f"{saga}.deadline"


def answer_topic(saga: str) -> str:
    """Return the topic of the answers that operators give to a saga."""
    return f"{saga}.answer"


class SagaStatus(enum.StrEnum):
    """Where a saga is: on its way, undoing its steps, or at one of its two ends."""

    RUNNING = "running"
    COMPENSATING = "compensating"
    COMPLETED = "completed"
    COMPENSATED = "compensated"


class CommandKind(enum.StrEnum):
    """What a command asks a participant for."""

    ACTION = "action"
    COMPENSATION = "compensation"


class CommandAnswer(enum.StrEnum):
    """What a participant answered."""

    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SagaCommand:
    """A command that a saga has sent, by the id of its message, and what came of it.

    ``reason`` is why it was refused, or can't be delivered; ``overdue_at`` when it wasn't answered in time; times are
    those of the database.
    """

    message_id: UUID
    number: int
    step: str
    kind: CommandKind
    sent_at: dt.datetime | None = None
    overdue_at: dt.datetime | None = None
    answered_at: dt.datetime | None = None
    answer: CommandAnswer | None = None
    reason: str | None = None
    result_type: str | None = field(default=None, repr=False)
    result: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, row: Row) -> SagaCommand:
        """Return the command of a row."""
        message_id, number, step, kind, sent_at, overdue_at, answered_at, answer, *rest = row
        known = CommandAnswer(answer) if answer else None
        return cls(message_id, number, step, CommandKind(kind), sent_at, overdue_at, answered_at, known, *rest)


@dataclass(slots=True)
class Flow(Generic[T]):
    """One saga that was started: its state, and the commands that it has sent.

    ``reason`` is why it is undone. ``id`` is that of the message that started it.
    """

    id: UUID
    name: str
    status: SagaStatus
    content_type: str
    raw: bytes = field(repr=False)
    started_at: dt.datetime
    ended_at: dt.datetime | None
    reason: str | None
    commands: list[SagaCommand]
    model: Any = field(default=None, repr=False)
    codecs: Codecs = field(default_factory=Codecs, repr=False)

    @classmethod
    def of(cls, row: Row, commands: list[SagaCommand], model: Any = None, codecs: Codecs | None = None) -> Flow[Any]:
        """Return the saga of a row."""
        id_, name, status, content_type, raw, started_at, ended_at, reason = row
        known = id_, name, SagaStatus(status), content_type, bytes(raw), started_at, ended_at, reason
        return cls(*known, commands, model, Codecs() if codecs is None else codecs)

    @property
    def body(self) -> T:
        """What it was started with."""
        body: T = self.codecs.decode(self.raw, self.content_type, self.model)
        return body

    @property
    def answers(self) -> Mapping[str, Any]:
        """The replies of participants that have done their steps, by the name of the step."""
        return {
            each.step: self.codecs.decode(bytes(each.result), each.result_type or "")
            for each in self.commands
            if each.kind is CommandKind.ACTION and each.answer is CommandAnswer.DONE and each.result is not None
        }

    def command(self, message_id: UUID) -> SagaCommand:
        """Return the command with the id of its message."""
        return next(each for each in self.commands if each.message_id == message_id)


#: The words for a command that a group never handles, by the status of its delivery.
_UNDELIVERABLE: Mapping[DeliveryStatus, str] = {
    DeliveryStatus.PARKED: "is parked in",
    DeliveryStatus.RESEND_EXHAUSTED: "is lost to",
    DeliveryStatus.EXPIRED: "is expired in",
}


@dataclass(frozen=True, slots=True)
class SagaStep:
    """A step of a saga: the topic of its command, that of the command that undoes it, and those of its answers.

    ``group`` is the participant's, where it is known. ``timeout`` are the seconds that it has to answer. ``body`` makes
    the body of its commands of the `Flow`.
    """

    name: str
    topic: str | Topic[Any]
    reply_to: str
    compensate: str | Topic[Any] | None
    group: str | None
    timeout: float | None
    body: Callable[[Flow[Any]], Any] | None


@dataclass(frozen=True, slots=True)
class _EndFunction(CalledFunction):
    """What is called when a saga has ended, whose name stands for a topic."""

    kind: ClassVar[CalledKind] = FUNCTION
    decorator: ClassVar[str] = "function for the end"
    forms: ClassVar[tuple[tuple[str, ...], ...]] = (("flow", "session"),)


class Saga(Generic[T]):
    """A saga, declared on the `Outbox` of the service that owns it, before its worker starts.

    ``name`` is also that of the group that reads the answers. What a saga is started with, and its commands by
    default, are of ``model``. A participant has ``timeout`` (timedelta or seconds; None: for ever) to answer, unless
    its step says otherwise.

    Raises:
        InvalidHandler: the Outbox has a saga of this name already.
        InvalidMessage: the name or the duration isn't one.
    """

    def __init__(
        self, outbox: Outbox, name: str, *, model: type[T] | None = None, timeout: dt.timedelta | float | None = 60.0
    ) -> None:
        self.name: str = check_group(name)
        self.steps: list[SagaStep] = []
        self._outbox = outbox
        self._model = model
        self._timeout = None if timeout is None else check_seconds("timeout", timeout)
        self._functions = CalledFunctions()
        outbox.consumer(self.start_topic, group=name)(self._begin)
        outbox.consumer(deadline_topic(name), group=name)(self._remind)
        outbox.consumer(answer_topic(name), group=name)(self._read_answer)

    @cached_property
    def start_topic(self) -> str:
        """The topic of the messages that start it."""
        return f"{self.name}.start"

    # --- declaring --------------------------------------------------------------------------------------------------

    def step(
        self,
        name: str,
        topic: str | Topic[Any],
        *,
        compensate: str | Topic[Any] | None = None,
        group: str | None = None,
        source: Engine | AsyncEngine | str | None = None,
        timeout: dt.timedelta | float | None = None,
        body: Callable[[Flow[T]], Any] | None = None,
    ) -> Saga[T]:
        """Add a step after those that there are; return the saga.

        The participant consumes ``topic`` and answers each message; its database is ``source`` where that isn't this
        one. ``compensate`` is the topic of the command that undoes the step, whose `Message.correlation` is the id of
        the message that had it done; without one there is nothing to undo. ``group`` is the one by which it consumes
        both: workers with the role ``confirm`` ask its inbox, and take what it has parked or lost as refused. Without
        it the saga waits for an operator then. ``body`` makes the commands' body of the `Flow`, such as of what earlier
        steps answered.

        Raises:
            InvalidHandler: there is a step of this name, ``body`` can't be called with a flow, or the Outbox has an
                `on_undeliverable` for a topic whose group is named here.
            InvalidMessage: a name or duration isn't one.
        """
        if any(each.name == name for each in self.steps):
            raise InvalidHandler(f"saga {self.name!r} has a step {name!r} already; each has a name of its own")
        if body is not None:
            check_function(f"saga {self.name!r}, step {name!r}: body", body, ("flow",))
        seconds = self._timeout if timeout is None else check_seconds("timeout", timeout)
        reply_to = f"{self.name}.reply.{name}"
        self._outbox.consumer(reply_to, group=self.name, source=source)(self._read_answer)
        for commanded in (topic, compensate):
            if group is not None and commanded is not None:
                self._know(commanded, group, source)
        self.steps.append(SagaStep(name, topic, reply_to, compensate, group, seconds, body))
        return self

    def _know(self, topic: str | Topic[Any], group: str, source: Engine | AsyncEngine | str | None) -> None:
        """Have workers learn what of a topic a participant's group has parked or lost."""
        name = topic.name if isinstance(topic, Topic) else topic
        if (name, group) not in self._outbox.known_groups:
            self._outbox.known_group(topic, group=group, consumer=source)
        earlier = self._outbox.delivery_callbacks.get((name, "undeliverable"))
        if earlier is not None and isinstance(earlier.function, _UndeliverableCommand):
            earlier.function.sagas.append(self)
        else:
            self._outbox.on_undeliverable(topic, model=Any)(_UndeliverableCommand([self]))

    def ended(self, function: F) -> F:
        """Decorate the function to call when a saga has ended: ``function(flow, session)``, in the transaction of that.

        Raises:
            InvalidHandler: there is one already, or it can't be called so.
        """
        self._functions.add(_EndFunction(self.name, function))
        return function

    # --- what users do ----------------------------------------------------------------------------------------------

    def start(self, carrier: Any, body: T, **options: Unpack[SendOptions]) -> UUID:
        """Start the saga with the transaction of ``carrier``; return its id.

        It is a message, sent as by `Outbox.send`, whose carriers, options and errors these are: an ``id`` makes a
        second start fail, and with ``dedupe`` it returns the first saga. (With psycopg's AsyncConnection or one of
        asyncpg, await it.)

        Raises:
            InvalidHandler: it has no steps.
            InvalidMessage: the body isn't of the saga's model.
        """
        if not self.steps:
            raise InvalidHandler(f"saga {self.name!r} has no steps; declare them with step()")
        codecs = self._outbox.codecs
        codecs.decode(*codecs.encode(body), self._model)
        flow_id: UUID = self._outbox.current.send(carrier, self.start_topic, body, **options)
        return flow_id

    def flow(self, session: Session | Connection, flow_id: UUID) -> Flow[T] | None:
        """Return a saga that was started, by the id that `start` returned; None before a worker has begun with it."""
        return next(iter(self.flows(session, flow_id=flow_id)), None)

    def flows(
        self,
        session: Session | Connection,
        *,
        flow_id: UUID | None = None,
        status: SagaStatus | None = None,
        limit: int = 100,
    ) -> list[Flow[T]]:
        """Return the newest sagas that were started, of a status if one is given."""
        connection = session if isinstance(session, Connection) else session.connection()
        return read_flows(
            connection,
            self._outbox.current.settings.schema,
            name=self.name,
            flow_id=flow_id,
            status=status,
            limit=limit,
            model=self._model,
            codecs=self._outbox.codecs,
        )

    # --- what messages do -------------------------------------------------------------------------------------------

    def _begin(self, message: Message, session: Session) -> None:
        values = {"id": message.id, "name": self.name, "content_type": message.content_type, "body": message.raw}
        connection, schema = session.connection(), self._outbox.current.settings.schema
        (begun,) = execute(connection, sql.start(schema, **values))
        if not begun:
            return
        row = (message.id, self.name, SagaStatus.RUNNING, message.content_type, message.raw, begun[0][0], None, None)
        _Advance(self, self._locked_flow(row, []), connection, session).send(self.steps[0], CommandKind.ACTION)

    def _read_answer(self, message: Message, session: Session) -> Park | Retry | None:
        advance = self._advance(message.correlation, session)
        if advance is None:
            if self._may_come(message, session):
                return Retry(reason=f"saga {self.name!r} hasn't come (again) to what it answers")
            return Park(f"it answers no command of saga {self.name!r}: its correlation is {message.correlation}")
        advance.answered(message)
        return None

    def _may_come(self, message: Message, session: Session) -> bool:
        """Tell whether the saga is about to send what a message answers: its database is older than the participant's.

        The command will have the same id again.
        """
        named = {str(message.conversation), message.key}
        ids = [UUID(each) for each in named if each is not None and _UUID_TEXT.fullmatch(each)]
        may_come = sql.may_come(self._outbox.current.settings.schema, ids=ids, name=self.name, start=self.start_topic)
        (((may,),),) = execute(session.connection(), may_come)
        return bool(may)

    def _remind(self, message: Message, session: Session) -> None:
        advance = self._advance(UUID(message.body["command"]), session)
        if advance is not None:
            advance.overdue(UUID(message.body["command"]), message.body["times"])

    def _give_up(self, delivery: Delivery, session: Session) -> None:
        """Take a command as refused that its participant has parked or lost; others are none of this saga's."""
        advance = self._advance(delivery.message.id, session)
        if advance is not None:
            advance.undeliverable(delivery)

    def _advance(self, command: UUID | None, session: Session) -> _Advance | None:
        """Lock the saga that has sent a command; None where there is none (any more)."""
        connection, schema = session.connection(), self._outbox.current.settings.schema
        named = {"command": command}
        rows, commands = execute(
            connection, sql.lock(schema, name=self.name, **named), sql.commands_beside(schema, **named)
        )
        if not rows:
            return None
        flow = self._locked_flow(rows[0], [SagaCommand.of(row) for row in commands])
        return _Advance(self, flow, connection, session)

    def _locked_flow(self, row: Row, commands: list[SagaCommand]) -> Flow[Any]:
        return Flow.of(row, commands, self._model, self._outbox.codecs)


@dataclass(slots=True)
class _UndeliverableCommand:
    """The callback for a topic's undeliverable messages, which all sagas share that send commands to it."""

    sagas: list[Saga[Any]]

    def __call__(self, delivery: Delivery, session: Session) -> None:
        """Tell the saga that sent the command."""
        for saga in dict.fromkeys(self.sagas):
            saga._give_up(delivery, session)


@dataclass(slots=True)
class _Advance:
    """One transition of a saga whose row is locked, in the transaction of the message that causes it."""

    saga: Saga[Any]
    flow: Flow[Any]
    connection: Connection
    session: Session

    def answered(self, message: Message) -> None:
        """Take note of an answer, and go on."""
        command = self._command(message.correlation)
        if message.refusal is None:
            self._done(command, message.content_type, message.raw)
        else:
            self._refused(command, message.refusal, f"{command.step} was refused: {message.refusal}")

    def undeliverable(self, delivery: Delivery) -> None:
        """Take note that a participant has parked a command, lost it for good, or come to it too late; and go on."""
        command = self._command(delivery.message.id)
        if command.answer is not None or delivery.group != self._step(command.step).group:
            return
        what = _UNDELIVERABLE[delivery.status]
        reason = f"{what} group {delivery.group}: {delivery.reason}"
        if command.kind is CommandKind.ACTION:
            self._refused(command, reason, f"{command.step} {reason}")
        else:
            at_commit(self.connection, sql.stuck(self._schema, command=command.message_id, reason=reason))
            self._emit(UndoUndeliverable(**self._facts(command), reason=reason))

    def _done(self, command: SagaCommand, content_type: str, raw: bytes) -> None:
        is_action, status = command.kind is CommandKind.ACTION, self.flow.status
        if command.answer is None:
            self._note(command, CommandAnswer.DONE, None, content_type, raw)
            if is_action and status is SagaStatus.RUNNING:
                self._go_on(command)
            else:
                self._undo_next()
        elif command.answer is CommandAnswer.REFUSED and is_action:
            # The reason stays beside the yes where its end was told already: see _change().
            has_ended = status is SagaStatus.COMPENSATED
            self._note(command, CommandAnswer.DONE, command.reason if has_ended else None, content_type, raw)
            self._emit(StepDoneAfterAll(**self._facts(command), reason=command.reason or ""))
            if has_ended:
                self._change(SagaStatus.COMPENSATING)
            self._undo_next()

    def _refused(self, command: SagaCommand, reason: str, of_flow: str) -> None:
        """Take note of a refusal, and go on; ``of_flow`` is why the saga is undone, if this is what ends its way."""
        if command.answer is not None:
            return
        self._note(command, CommandAnswer.REFUSED, reason, None, None)
        if command.kind is CommandKind.COMPENSATION:
            self._emit(UndoRefused(**self._facts(command), reason=reason))
            step = self._step(command.step)
            self.send(step, CommandKind.COMPENSATION, delay=_AGAIN if step.timeout is None else step.timeout)
        elif self.flow.status is SagaStatus.RUNNING:
            self._turn_back(of_flow)
        else:
            self._undo_next()

    def overdue(self, message_id: UUID, times: int) -> None:
        """Turn back, unless the command was answered; tell it, and see to it that it is told again."""
        command = self._command(message_id)
        if command.answer is not None:
            return
        step = self._step(command.step)
        timeout = step.timeout or _AGAIN
        schema = self._schema
        at_commit(self.connection, sql.overdue(schema, command=message_id))
        self._emit(SagaOverdue(**self._facts(command), times=times + 1))
        self._set_deadline(message_id, min(timeout * 2 ** (times + 1), _DAY), times + 1)
        if command.kind is CommandKind.ACTION and self.flow.status is SagaStatus.RUNNING:
            self._turn_back(f"{command.step} has not answered within {timeout:g} s")

    def send(self, step: SagaStep, kind: CommandKind, *, delay: float = 0.0) -> None:
        """Send the command of a step, write it down, and see to it that it is missed."""
        flow = self.flow
        undoes = kind is CommandKind.COMPENSATION
        topic = step.compensate if undoes else step.topic
        assert topic is not None  # noqa: S101 - only steps with a command to undo them are undone
        # Of the flow's state, not of the message that moves it: an owner's database that was restored may come to a
        # command in another way, and its participant has it once all the same.
        earlier = sum(each.step == step.name and each.kind is kind for each in flow.commands)
        message_id = derived_id(flow.id, self.saga.name, step.name, kind.value, earlier)
        options: SendOptions = {
            "id": message_id,
            "on_duplicate": "ignore",
            "key": str(flow.id),
            "reply_to": step.reply_to,
        }
        if undoes:
            options["correlation"] = self._done_by(step.name)
        if delay:
            options["delay"] = delay
        body = flow.body if step.body is None else finished("body", step.body(flow))
        self.saga._outbox.current.send(self.session, topic, body, **options)
        command = SagaCommand(message_id, len(flow.commands) + 1, step.name, kind)
        flow.commands.append(command)
        values = {"message_id": message_id, "saga_id": flow.id, "number": command.number}
        at_commit(self.connection, sql.send(self._schema, **values, step=step.name, kind=kind.value))
        if step.timeout is not None:
            self._set_deadline(message_id, delay + step.timeout, 0)

    def _go_on(self, command: SagaCommand) -> None:
        names = [each.name for each in self.saga.steps]
        following = names.index(self._step(command.step).name) + 1
        if following < len(names):
            self.send(self.saga.steps[following], CommandKind.ACTION)
        else:
            self._change(SagaStatus.COMPLETED)

    def _turn_back(self, reason: str) -> None:
        self._change(SagaStatus.COMPENSATING, reason)
        self._undo_next()

    def _undo_next(self) -> None:
        """Undo the last step that was done and isn't undone; end, if there is none and nothing is in doubt."""
        if self.flow.status is not SagaStatus.COMPENSATING:
            return
        kinds = {each.kind for each in self.flow.commands if each.answer is None}
        if CommandKind.COMPENSATION in kinds:
            return
        done = [each for each in self.flow.commands if each.answer is CommandAnswer.DONE]
        undone = {each.step for each in done if each.kind is CommandKind.COMPENSATION}
        for command in reversed(done):
            step = self._step(command.step)
            if command.kind is CommandKind.ACTION and step.compensate is not None and step.name not in undone:
                self.send(step, CommandKind.COMPENSATION)
                return
        if not kinds:
            self._change(SagaStatus.COMPENSATED)

    def _change(self, status: SagaStatus, reason: str | None = None) -> None:
        flow = self.flow
        ended = status in {SagaStatus.COMPLETED, SagaStatus.COMPENSATED}
        flow.status, flow.reason = status, flow.reason or reason
        change = {"id": flow.id, "status": status.value, "reason": reason, "ended": ended}
        at_commit(self.connection, sql.change(self._schema, **change))
        # What had to undo a step after its end has told its end before.
        again = any(each.answer is CommandAnswer.DONE and each.reason is not None for each in flow.commands)
        for function in self.saga._functions if ended and not again else ():
            call_with(function, flow, self.session)

    def _note(
        self, command: SagaCommand, answer: CommandAnswer, reason: str | None, kind: str | None, raw: bytes | None
    ) -> None:
        """Write an answer down, here and in the database."""
        commands = self.flow.commands
        noted = SagaCommand(
            *(command.message_id, command.number, command.step, command.kind, command.sent_at, command.overdue_at),
            *(command.sent_at, answer, reason, kind, raw),
        )
        commands[commands.index(command)] = noted
        values = {"command": command.message_id, "answer": answer.value, "reason": reason}
        at_commit(self.connection, sql.answer(self._schema, **values, result_type=kind, result=raw))

    def _set_deadline(self, message_id: UUID, seconds: float, times: int) -> None:
        body, key = {"command": str(message_id), "times": times}, str(self.flow.id)
        options: SendOptions = {"key": key, "delay": seconds, "correlation": message_id, "on_duplicate": "ignore"}
        options["id"] = derived_id(message_id, "deadline", times)
        self.saga._outbox.current.send(self.session, deadline_topic(self.saga.name), body, **options)

    def _step(self, name: str) -> SagaStep:
        """Return the step of a name.

        Raises:
            InvalidHandler: the code doesn't have it any more.
        """
        for step in self.saga.steps:
            if step.name == name:
                return step
        raise InvalidHandler(
            f"saga {self.saga.name!r} has no step {name!r}, which flow {self.flow.id} has taken: keep a step until the "
            "flows have ended that know it"
        )

    def _done_by(self, step: str) -> UUID:
        """Return the id of the message by which a step was done."""
        return next(
            each.message_id for each in self.flow.commands if each.step == step and each.kind is CommandKind.ACTION
        )

    def _command(self, message_id: UUID | None) -> SagaCommand:
        assert message_id is not None  # noqa: S101 - the saga was found by it
        return self.flow.command(message_id)

    @property
    def _schema(self) -> str:
        return self.saga._outbox.current.settings.schema

    def _facts(self, command: SagaCommand) -> dict[str, Any]:
        facts = {"saga": self.saga.name, "flow_id": self.flow.id, "step": command.step}
        return {**facts, "command": command.kind.value, "message_id": command.message_id}

    def _emit(self, happened: TelemetryEvent) -> None:
        after_commit(self.connection, partial(emit, happened))


def read_flows(
    connection: Connection,
    schema: str,
    *,
    name: str | None = None,
    flow_id: UUID | None = None,
    status: SagaStatus | None = None,
    limit: int = 100,
    model: Any = None,
    codecs: Codecs | None = None,
) -> list[Flow[Any]]:
    """Return the newest sagas of a database: of a name, an id or a status."""
    chosen = {"id": flow_id, "name": name, "status": None if status is None else status.value}
    (rows,) = execute(connection, sql.sagas(schema, **chosen, limit=limit))
    (of_all,) = execute(connection, sql.commands(schema, [row[0] for row in rows]))
    by_saga: dict[UUID, list[SagaCommand]] = {row[0]: [] for row in rows}
    for saga_id, *command in of_all:
        by_saga[saga_id].append(SagaCommand.of(tuple(command)))
    return [Flow.of(row, by_saga[row[0]], model, codecs) for row in rows]
