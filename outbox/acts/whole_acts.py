"""The acts that ask for more than a yes: on a group, a topic, a lock, dead letters, a reconciliation, a saga; an edit.

As of the acts on messages (`outbox.acts.messages`), everything follows from a row: commands, endpoints, the pages that
ask, the audit's word, the permission, the documentation. A row names what is asked for as a dataclass, and is carried
out by the operator's method of its name. To add an act, add a row and that method.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from outbox.acts.changes import FEW, Declaration
from outbox.acts.forms import (
    PARTS,
    AnswerFields,
    ControlFields,
    EditFields,
    FilteredFields,
    FilterFields,
    InDatabase,
    LiftFields,
    NoteFields,
    OrderFields,
    PauseTopicFields,
    RateFields,
    RepairFields,
    ResetFields,
    SilenceFields,
    SkipFields,
)
from outbox.acts.messages import ACTS
from outbox.reader import FLAGS, option, shape_of

if TYPE_CHECKING:
    from outbox.acts.changes import Actor


#: The fields that name where an act is done, and where its producer is.
DATABASE_FIELDS: tuple[str, ...] = ("database", "source")
#: The fields that are as a preview has them: the act is done where it was shown, and to what was shown.
PINNED: tuple[str, ...] = (*DATABASE_FIELDS, "version", "number")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAct(Declaration):
    """One act that asks for more than a yes.

    ``noun`` is the group of commands, ``word`` the command in it, ``example`` what is typed after both. ``path`` is the
    address below that of the API, and names the parts of the target; ``target`` names it in a sentence. ``fields`` is
    the dataclass of what is asked for beside these and the reason; a command takes those of ``positional`` as
    arguments, and on the pages only a link gives those that are ``linked``. ``form`` is the template of the fields.

    ``of`` is the part of a `RequestContext` whose method does the act: the one called ``method``, else as the act is.
    ``preview`` is its method that tells what the act would do, ``current`` the one that tells how it is now, to be
    changed: each takes what it has parameters for. A ``secret`` form shows what is recorded, so that no link leads to
    it, and needs the permission to reveal. ``page`` is the page that lists the targets; there the act is ``offered``
    for a row, or beside the list for None. ``leads`` is where its result is, by the result's fields; ``status`` is the
    endpoint's answer. ``asks``: a command asks before it acts. ``variants`` are its words where a field is on.
    ``moments`` are texts of the field ``to`` that the pages offer by their words, the one that they begin with first.
    """

    noun: str
    word: str
    path: str
    target: str
    fields: Any
    example: str
    page: str
    of: Literal["operator", "reconciliations", "sagas"] = "operator"
    method: str = ""
    positional: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()
    form: str = ""
    preview: str = ""
    current: str = ""
    secret: bool = False
    offered: Callable[[Any], bool] = lambda row: row is not None
    leads: str = ""
    status: int = 200
    asks: bool = True
    variants: tuple[tuple[str, str], ...] = ()
    moments: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> list[str]:
        """The parts of the target."""
        return re.findall(r"\{(\w+)", self.path)

    def named(self, values: Mapping[str, Any]) -> str:
        """Return the target as a sentence names it."""
        return self.target.format(**values)

    def to_type(self, values: Mapping[str, Any], preview: Any = None) -> str:
        """Return what an operator types before the act where it can't be taken back; empty for others, and for ids.

        It is empty too where the ``preview`` says how many messages it reaches, and these are few.
        """
        grave = self.grave and getattr(preview, "reach", FEW + 1) > FEW
        return str(values[self.names[0]]) if grave and PARTS[self.names[0]].kind is str else ""

    def left_to_type(self, part: Any, values: Mapping[str, Any], typed: str) -> str | None:
        """Return what has to be typed instead of that; None if nothing has, as where it reaches few messages."""
        if typed == (needed := self.to_type(values)):
            return None
        needed = self.to_type(values, self.look(part, self.preview, values)) if self.preview else needed
        return needed or None

    def button_for(self, texts: Mapping[str, str]) -> str:
        """Return the words of the button where the fields are written so."""
        return next((word for name, word in self.variants if FLAGS.get(texts.get(name, "").lower())), self.button)

    def taken(self, part: Any, method: str) -> list[str]:
        """Return which values a method of the operator's ``part`` (``preview`` or ``current``) takes."""
        return [name for name in inspect.signature(getattr(part, method)).parameters if name != "self"]

    def look(self, part: Any, method: str, values: Mapping[str, Any]) -> Any:
        """Return what that method tells of the target."""
        return getattr(part, method)(**{name: values[name] for name in self.taken(part, method)})

    def pinned(self, values: dict[str, Any], preview: Any) -> dict[str, Any]:
        """Return the values with those that are as a preview has them: what is done is what was shown."""
        return values | {name: getattr(preview, name, values[name]) for name in values.keys() & {*PINNED}}

    def perform(self, part: Any, values: Mapping[str, Any], *, by: str | Actor, why: str) -> Any:
        """Do the act; return a sentence about it, or what it has made; see the operator's method for the errors."""
        return getattr(part, self.method or self.name)(**values, by=by, why=why)

    def at(self, address: str, *known: Any) -> list[str]:
        """Return the parts of an address (``page``, ``leads``), as far as values or fields of these are known."""
        values: dict[str, Any] = {}
        for each in known:
            values |= each if isinstance(each, Mapping) else _fields_of(each)
        found = [part for part in address.split("/") if not part.startswith("{") or part[1:-1] in values]
        return [part.format_map(values) for part in found]


def returned(method: Any) -> Any:
    """Return the type of what a method returns; a text where it tells in a sentence."""
    return method.__globals__.get(method.__annotations__["return"], str)


def _fields_of(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)} if is_dataclass(value) else {}


@cache
def form_of(act: WholeAct) -> Any:
    """Return the dataclass of all that an act is told: the parts of its target, and its fields."""
    parts = [(name, PARTS[name].kind, option(help=PARTS[name].help, most=PARTS[name].most)) for name in act.names]
    return make_dataclass(act.name, parts, bases=(act.fields,), frozen=True, kw_only=True)


@cache
def with_fields(kind: Any, name: str, names: frozenset[str], *bases: type, about: str = "") -> Any:
    """Return a dataclass of this name that has those fields of another one which have these names."""
    hints = get_type_hints(kind, include_extras=True)
    known = [
        (each.name, hints[each.name], field(default=each.default, metadata={"option": each.option}))
        for each in shape_of(kind)
        if each.name in names
    ]
    return make_dataclass(name, known, bases=bases, frozen=True, kw_only=True, namespace={"__doc__": about})


def facts_of(view: Any) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Return what a preview tells a person: its facts by their names, and its rows (dataclasses) by theirs."""
    values = {name.replace("_", " "): value for name, value in _fields_of(view).items() if value != ""}
    rows = {name: value for name, value in values.items() if isinstance(value, list) and any(map(is_dataclass, value))}
    return {name: _shown(value) for name, value in values.items() if name not in rows}, rows


def _shown(value: Any) -> str:
    """Return a value for a person: ``none`` where there is none, ``3 parked, 1 failed``, ``a (b), c (d)``."""
    if isinstance(value, Mapping):
        return ", ".join(f"{each} {name}" for name, each in value.items()) or "none"
    if isinstance(value, tuple):
        return f"{value[0]} ({', '.join(map(str, value[1:]))})"
    if isinstance(value, list) or value is None:
        return ", ".join(map(_shown, value or ())) or "none"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


# --- groups, topics, sessions, dead letters --------------------------------------------------------------------------

_GROUP: Any = {"noun": "group", "target": "group {group}", "page": "groups", "permission": "group:control"}
PAUSE_GROUP = WholeAct(
    name="pause_group",
    summary="Pause a group: its workers handle nothing until it is resumed",
    details="Of one topic, or of all that it consumes. Each worker sees it within a second; a transaction that runs "
    "goes on to its end. Nothing is lost: messages wait in their queues, and retries until the group goes on. It holds "
    "over restarts and for workers that start later.",
    why="the mail provider is being moved",
    consequence="Workers begin no message of this group until it is resumed; what runs goes on to its end. Messages "
    "wait in their queues.",
    happened="Paused: workers begin nothing more of it within a second.",
    button="Pause",
    word="pause",
    path="/groups/{group}/pause",
    fields=ControlFields,
    example="mailer",
    offered=lambda row: row.paused_at is None,
    **_GROUP,
)
RESUME_GROUP = WholeAct(
    name="resume_group",
    summary="Have a paused group go on; one that its breaker has stopped tries a message at once",
    details="Each worker sees it within a second. Messages that came meanwhile are handled in order; a rate stays.",
    why="the mail provider is back",
    consequence="Workers go on where the group stopped. If its breaker is open, one message is tried at once.",
    happened="Resumed: workers go on within a second.",
    button="Resume",
    needs_reason=False,
    word="resume",
    path="/groups/{group}/resume",
    fields=ControlFields,
    example="mailer --topic transfer",
    offered=lambda row: bool(row.paused_at or row.opened_at),
    **_GROUP,
)
SET_RATE = WholeAct(
    name="set_rate",
    summary="Have a group handle only so many messages a second, over all workers",
    details="It replaces the rate that the group's handler declares, until it is lifted again; then the declared one "
    "counts, if there is one. Each worker sees it within a second.",
    why="the provider allows 50 calls a second",
    consequence="All workers together begin no more messages of this group in a second than that.",
    happened="Written down: workers keep to it within a second.",
    button="Set the rate",
    needs_reason=False,
    word="rate",
    path="/groups/{group}/rate",
    fields=RateFields,
    positional=("rate",),
    current="control_of",
    example="mailer 50/s",
    **_GROUP,
)
_GRAVE: Any = {"role": "admin", "grave": True}
_OF_TOPIC: Any = {"noun": "group", "target": "group {group} of topic {topic}", "page": "groups", **_GRAVE}
RESET_GROUP = WholeAct(
    name="reset_group",
    summary="Have a group read a topic again, from a time or a position on",
    details="It handles again all messages that it had consumed, failed or parked there, in order and with all "
    "attempts. The earlier inbox row of each message is kept. A message that is quarantined, discarded, compensated or "
    "expired is not handled again. Refused where messages of then were pruned, unless that is accepted, and while a "
    "handler holds a queue.",
    why="the handler of Friday rounded the amounts",
    consequence="The group handles these messages once more: each effect of its handler comes a second time, unless "
    "the handler sees to that.",
    happened="Reset: the group reads on from there.",
    permission="group:reset",
    button="Reset",
    word="reset",
    path="/groups/{group}/{topic:path}/reset",
    fields=ResetFields,
    preview="preview_reset",
    moments=(
        ("yesterday", "start of yesterday"),
        ("today", "start of today"),
        ("1h", "an hour ago"),
        ("15m", "15 minutes ago"),
        ("7d", "a week ago"),
        ("first", "the beginning"),
    ),
    example="ledger --topic transfer --to 3d",
    **_OF_TOPIC,
)
SKIP_GROUP = WholeAct(
    name="skip_group",
    summary="Have a group leave out the messages that it hasn't read yet",
    details="It reads on from now, or from a time or position ahead of it. A message that it leaves out is never "
    "handled, unless the group is reset. Failed and parked messages stay so.",
    why="the backlog is of a load test",
    consequence="The group never handles these messages.",
    happened="Skipped: the group reads on from there.",
    permission="group:skip",
    button="Skip",
    word="skip",
    path="/groups/{group}/{topic:path}/skip",
    fields=SkipFields,
    preview="preview_skip",
    moments=(("now", "now"), ("15m", "15 minutes ago"), ("1h", "an hour ago"), ("today", "start of today")),
    example="mailer --topic transfer",
    **_OF_TOPIC,
)
DELETE_GROUP = WholeAct(
    name="delete_group",
    summary="Delete a group of a topic that is gone, with its inbox",
    details="It holds no messages of its producer any more, and is in no list and no statistics. Refused while a "
    "worker consumes for it. Should it come back, it begins anew, and handles again what its producer still has.",
    why="the statistics service was shut down in May",
    consequence="The group's inbox and offsets are forgotten. Should it come back, it handles again all messages that "
    "its producer still has.",
    happened="Deleted.",
    permission="group:delete",
    button="Delete",
    word="delete",
    path="/groups/{group}/{topic:path}/delete",
    fields=InDatabase,
    preview="preview_delete",
    example="statistics --topic transfer",
    **_OF_TOPIC,
)
_TOPIC: Any = {"noun": "topics", "target": "topic {topic}", "page": "groups"}
PAUSE_TOPIC = WholeAct(
    name="pause_topic",
    summary="Pause the dispatch of a topic: nothing more of it reaches any group until it is resumed",
    details="Producers go on: their messages commit, and wait in the schedule, from where they can be recalled. The "
    "messages in the queues are still consumed; pause the groups to stop that. A message that is sent again "
    "by an operator goes out at once.",
    why="orders are being sent twice since the release",
    consequence="New messages of this topic are held: no group gets them until the topic is resumed.",
    happened="Paused: its new messages are held.",
    permission="topic:control",
    button="Pause",
    word="pause",
    path="/topics/{topic:path}/pause",
    fields=PauseTopicFields,
    example="orders",
    offered=lambda row: row is None,
    **_TOPIC,
)
RESUME_TOPIC = WholeAct(
    name="resume_topic",
    summary="Have the dispatch of a paused topic go on",
    details="Held messages go out in the order of their commits, and no new message of the topic before them.",
    why="the release was taken back",
    consequence="Held messages go out, in the order of their commits.",
    happened="Resumed: held messages go out within a second.",
    permission="topic:control",
    button="Resume",
    needs_reason=False,
    word="resume",
    path="/topics/{topic:path}/resume",
    fields=InDatabase,
    example="orders",
    offered=lambda row: row is not None and row.resumed_at is None,
    **_TOPIC,
)
DELETE_TOPIC = WholeAct(
    name="delete_topic",
    summary="Delete a topic that is gone",
    details="Its last messages, its number of queues and its counts are forgotten; it is in no list and no statistics. "
    "Refused while it has groups, handlers of living workers, undecided halves, scheduled messages, or messages that "
    "prune has yet to delete. The next message to it makes it anew.",
    why="nothing is sent to it since May",
    consequence="The topic is forgotten. The next message to it makes it anew, with the default number of queues.",
    happened="Deleted.",
    permission="topic:delete",
    role="admin",
    button="Delete",
    grave=True,
    word="delete",
    path="/topics/{topic:path}/delete",
    fields=InDatabase,
    preview="preview_delete_topic",
    offered=lambda row: row is None,
    example="order-created",
    **_TOPIC,
)
END = WholeAct(
    name="end",
    summary="End the session that keeps a lock of dispatch or of a group's queue from all workers",
    details="The database ends the session: its transaction rolls back, and another worker goes on where it began. A "
    "handler that still runs there fails at its next statement, and its message is handled again. Refused if the "
    "session holds no such lock any more.",
    why="its host is gone",
    consequence="The database ends this session: its transaction rolls back, and another worker goes on where it "
    "began. A handler that still runs there fails at its next statement, and its message is handled again.",
    happened="Ended: what its transaction did is rolled back, and another worker goes on.",
    permission="lock:end",
    role="admin",
    button="End",
    grave=True,
    noun="lock",
    word="end",
    path="/locks/{session}/end",
    target="the session {session}",
    fields=InDatabase,
    preview="lock_of",
    page="locks",
    example="6564f1a2.1267",
)
NOTE = WholeAct(
    name="note",
    summary="Write a note about a group of dead letters, and name its owner",
    details="For the next operator. It stands beside the group, topic and kind of error wherever these "
    "are shown, also for those that come later. An empty note without an owner takes it away.",
    why="",
    consequence="It stands beside all dead letters of this group, topic and kind of error, and replaces what stands "
    "there. Leave both empty to take it away.",
    happened="Noted.",
    permission="dead:note",
    button="Note",
    needs_reason=False,
    noun="dead",
    word="note",
    path="/dead/groups/{fingerprint}/note",
    target="dead letters of {fingerprint}",
    fields=NoteFields,
    current="dead_group",
    page="dead",
    asks=False,
    example='0f3a91c2d4e5b6a7 --owner payments --note "back at noon"',
)

# --- rules of health -------------------------------------------------------------------------------------------------

_RULE: Any = {"noun": "rule", "target": "rule {rule}", "page": "", "permission": "rule:silence", "asks": False}
_OF_FINDING = ("topic", "group", "database")
SILENCE = WholeAct(
    name="silence",
    summary="Silence a rule of health for a time, from now on or in a maintenance window",
    details="What the rule finds is still shown, as silenced: it needs no attention, and the exit code of the doctor "
    "leaves it out. It can be limited to a topic, a group, a database. A silence ends by itself.",
    why="the mail provider moves on Sunday",
    consequence="Until it ends, what this rule finds needs no attention. It is still found, and shown as silenced.",
    happened="Silenced.",
    button="Silence",
    word="silence",
    path="/rules/{rule}/silence",
    fields=SilenceFields,
    linked=_OF_FINDING,
    example="group.unconsumed --group mailer --lasts 2h",
    offered=lambda row: row is not None and not row.silenced,
    **_RULE,
)
LIFT_SILENCE = WholeAct(
    name="lift_silence",
    summary="Lift the silences of a rule of health before their end",
    details="All of them; or those that silence a topic, a group, a database, also where they silence more than that.",
    why="the provider has moved",
    consequence="What this rule finds needs attention again.",
    happened="Lifted: what the rule finds needs attention again.",
    button="Lift the silence",
    needs_reason=False,
    word="lift",
    path="/rules/{rule}/lift",
    fields=LiftFields,
    linked=_OF_FINDING,
    example="group.unconsumed",
    offered=lambda row: row is not None and bool(row.silenced),
    leads="silences",
    **_RULE,
)

_FILTER: Any = {"noun": "filter", "target": "filter {filter}", "permission": "filter:save"}
_FILTER |= {"page": "{of}", "needs_reason": False, "asks": False}
SAVE_FILTER = WholeAct(
    name="save_filter",
    summary="Save the filter of a list under a name, for yourself",
    details="The lists of the console show the filters of their user. One that has this name is replaced.",
    why="the orders that the bank has refused",
    consequence="The filter is a link beside the list, for you alone, or for all where the console has no login.",
    happened="Saved.",
    button="Save",
    word="save",
    path="/filters/{filter}/save",
    fields=FilterFields,
    linked=("of", "query"),
    example="refused --of messages --query 'topic=orders'",
    offered=lambda row: row is None,
    **_FILTER,
)
DELETE_FILTER = WholeAct(
    name="delete_filter",
    summary="Delete a saved filter of yours",
    details="Nothing else goes with it.",
    why="the bank has mended it",
    consequence="The filter is no link beside the list any more.",
    happened="Deleted.",
    button="Delete",
    word="delete",
    path="/filters/{filter}/delete",
    fields=FilteredFields,
    linked=("of",),
    example="refused --of messages",
    **_FILTER,
)

# --- schedules -------------------------------------------------------------------------------------------------------

_CRON: Any = {
    "noun": "cron",
    "target": "schedule {cron}",
    "page": "cron",
    "fields": InDatabase,
    "example": "report_due",
}
PAUSE_CRON = WholeAct(
    name="pause_cron",
    summary="Pause a schedule: no message of it is sent until it is resumed",
    details="It holds over restarts, and for workers that start later. The times that pass meanwhile are left out.",
    why="the report is being rebuilt",
    consequence="No message of this schedule is sent until it is resumed. The times that pass meanwhile are left out.",
    happened="Paused: no message of it is sent.",
    permission="schedule:control",
    button="Pause",
    word="pause",
    path="/cron/{cron}/pause",
    offered=lambda row: row is not None and row.paused_at is None,
    **_CRON,
)
RESUME_CRON = WholeAct(
    name="resume_cron",
    summary="Have a paused schedule go on with its next time",
    details="The times that passed while it was paused are left out.",
    why="the report is back",
    consequence="It goes on with its next time.",
    happened="Resumed: it goes on with its next time.",
    permission="schedule:control",
    button="Resume",
    needs_reason=False,
    word="resume",
    path="/cron/{cron}/resume",
    offered=lambda row: row is not None and row.paused_at is not None,
    **_CRON,
)
RUN_CRON = WholeAct(
    name="run_cron",
    summary="Have a worker send a message of a schedule now",
    details="Beside the messages of its times, which stay as they are; also while it is paused. A worker that declares "
    "the schedule makes it with the time of the order.",
    why="the night's report went to the wrong address",
    consequence="A worker sends one more message of this schedule now. Its times stay as they are.",
    happened="Ordered: a worker that declares it sends the message within seconds.",
    permission="schedule:control",
    button="Run",
    needs_reason=False,
    word="run",
    path="/cron/{cron}/run",
    status=202,
    asks=False,
    **_CRON,
)
DELETE_CRON = WholeAct(
    name="delete_cron",
    summary="Delete a schedule that no application declares any more",
    details="It is in no list any more. A worker that still declares it makes it anew, and goes on with the next time.",
    why="the report is gone since May",
    consequence="The schedule is forgotten. A worker that still declares it makes it anew.",
    happened="Deleted.",
    permission="schedule:delete",
    role="admin",
    button="Delete",
    grave=True,
    word="delete",
    path="/cron/{cron}/delete",
    **_CRON,
)

# --- reconciliations, sagas, a copy with another body ----------------------------------------------------------------

RECONCILE = WholeAct(
    name="reconcile",
    summary="Have a worker run a reconciliation now, ahead of its timetable",
    details="A worker with the role reconcile that has declared it takes the order, and runs it as it is declared; a "
    "dry run compares, and repairs nothing. The timetable stays as it is.",
    why="the consumer's database was restored",
    consequence="A worker compares both sides now, as the reconciliation is declared: if it is declared with repairs, "
    "what differs is repaired too. Nothing is repaired in a dry run, which shows what would be.",
    happened="Ordered: a worker takes it up within seconds, and its run appears in the list.",
    permission="reconciliation:run",
    button="Run",
    variants=(("dry_run", "Dry run"),),
    needs_reason=False,
    noun="reconcile",
    word="order",
    path="/reconciliations/schedules/{schedule:path}/order",
    target="reconciliation {schedule}",
    fields=OrderFields,
    of="reconciliations",
    method="run_now",
    linked=("dry_run", "topic", "group"),
    page="reconciliations",
    status=202,
    asks=False,
    example="nightly --dry-run",
)
REPAIR = WholeAct(
    name="repair",
    summary="Repair the findings of a run of a reconciliation",
    details="A bulk job, which a worker carries out that has the reconciliation. It reads both sides of each message "
    "once more, and leaves a finding alone that has healed, or is of another kind by now.",
    why="the group has lost its inbox",
    consequence="A worker reads both sides of each message once more, and repairs those that are still as found. What "
    "became of each is shown while it goes on, and it can be cancelled.",
    happened="Ordered. A worker that has the reconciliation carries it out.",
    permission="reconciliation:repair",
    button="Repair",
    noun="reconcile",
    word="repair",
    path="/reconciliations/runs/{run_id}/repair",
    target="what run {run_id} has found",
    fields=RepairFields,
    of="reconciliations",
    linked=("kind", "messages", "repair"),
    preview="preview_repair",
    page="reconciliations/{run_id}",
    leads="bulk-jobs/{id}",
    status=202,
    example="01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --kind parked --repair retry",
)
ANSWER = WholeAct(
    name="answer",
    summary="Answer a saga's command for a participant that doesn't",
    details="For a step in doubt, once it is known what the participant did: done, with the reply that it owes "
    "where later steps need that; or refused. The saga goes on as with an answer of the participant's: a step that is "
    "done is undone if the saga turns back. Retry a command that its group has parked instead. Refused if there is an "
    "answer, and for a command that undoes a step: that can't be refused.",
    why="the hotel confirms the booking by phone",
    consequence="You answer in place of the participant: the saga goes on as if it had answered so. If its group has "
    "parked the message, have it tried again instead.",
    happened="Answered: the saga goes on as soon as a worker comes to it.",
    permission="saga:answer",
    role="admin",
    button="Answer",
    grave=True,
    noun="sagas",
    word="answer",
    path="/sagas/commands/{command}/answer",
    target="command {command}",
    fields=AnswerFields,
    of="sagas",
    positional=("answer",),
    preview="command",
    page="sagas/{flow}",
    example="01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 done",
)
EDIT = WholeAct(
    name="edit",
    summary="Send a copy of a dispatched message with another body, under a new id",
    details="For a message that can't succeed as it is. Its topic, key, tag and headers are the original's, and each "
    "has a link to the other. The original is quarantined first, so that no group takes it any more; or discarded "
    "where it is parked; or left as it is. Refused if a group has consumed the original, and if there is a copy "
    "already, unless that is acknowledged.",
    why="the account number had a typo",
    consequence="A new message with this body goes out to all groups of the topic. What becomes of the original is up "
    "to you: it is set aside before, so that the effect doesn't come twice.",
    happened="Sent: this is the copy, a message with an id of its own.",
    permission="message:edit",
    role="admin",
    button="Edit and resend",
    grave=True,
    noun="messages",
    word="edit",
    path="/messages/{message_id}/edit",
    target="message {message_id}",
    fields=EditFields,
    form="edit.html",
    preview="preview_edit",
    current="body_to_edit",
    secret=True,
    page="messages/{message_id}",
    leads="messages/{id}",
    status=201,
    example="01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --body mended.json",
)

#: Every act that asks for more than a yes, by its name.
WHOLE_ACTS: Mapping[str, WholeAct] = {
    each.name: each
    for each in (
        *(PAUSE_GROUP, RESUME_GROUP, SET_RATE, RESET_GROUP, SKIP_GROUP, DELETE_GROUP),
        *(PAUSE_TOPIC, RESUME_TOPIC, DELETE_TOPIC, PAUSE_CRON, RESUME_CRON, RUN_CRON, DELETE_CRON),
        *(END, NOTE, SILENCE, LIFT_SILENCE, SAVE_FILTER, DELETE_FILTER, RECONCILE, REPAIR, ANSWER, EDIT),
    )
}

#: What every act says and demands.
DECLARATIONS: tuple[Declaration, ...] = (*ACTS.values(), *WHOLE_ACTS.values())

#: The word under which the audit has the end of a session of the console.
LOG_OUT = "log_out"

#: Every word that the audit can have as an action: the acts, and what else operators, workers and reconciliations do:
#: see an unmasked body, order or cancel a bulk job, log out of the console, quarantine a message and lift that again,
#: write the message or the status that was missing.
AUDITED: tuple[str, ...] = (
    *(act.name for act in DECLARATIONS),
    *("bulk", "reveal", LOG_OUT, "quarantine", "release", "dispatch", "sync_status", "sync_opinion"),
)


def whole_acts_of(noun: str, row: Any = None) -> list[WholeAct]:
    """Return the acts that are offered on a row of a list; without one, beside the list."""
    return [each for each in WHOLE_ACTS.values() if each.noun == noun and each.offered(row)]
