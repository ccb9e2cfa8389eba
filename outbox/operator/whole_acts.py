"""The acts on what isn't a message: a group, a topic, a session that holds a lock, a group of dead letters.

As of the acts on messages (`outbox.operator.acts`), everything follows from a row: commands, endpoints, the pages that
ask, the audit's word, the permission, the documentation. A row names what is asked for as a dataclass, and is carried
out by the operator's method of its name. To add an act, add a row and that method.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from outbox.message.content import GROUP_PATTERN, MAX_GROUP, MAX_TOPIC, TOPIC_PATTERN
from outbox.operator.acts import ACTS, SPECIAL, Declaration
from outbox.operator.model import LONGEST
from outbox.reader import option

if TYPE_CHECKING:
    from outbox.operator.model import Actor
    from outbox.operator.operator import Operator

#: The parts of targets, as paths and commands name them: what each is, and what it must be like.
PARTS: Mapping[str, tuple[str, str, int]] = {
    "group": ("The group, as `outbox group list` names it.", GROUP_PATTERN, MAX_GROUP),
    "topic": ("The topic.", TOPIC_PATTERN, MAX_TOPIC),
    "session": ("The session, as `outbox lock list` names it.", r"^[0-9a-f]+\.[0-9a-f]+$", 64),
    "fingerprint": ("The group of dead letters, as `outbox dead groups` names it.", r"^[0-9a-f]{1,64}$", 64),
}

#: The fields that name where an act is done, and where its producer is.
DATABASE_FIELDS: tuple[str, ...] = ("database", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAct(Declaration):
    """One act on something that isn't a message.

    ``noun`` is the group of commands, ``word`` the command in it, ``example`` what is typed after both. ``path`` is the
    address below that of the API, and names the parts of the target; ``target`` names it in a sentence. ``fields`` is
    the dataclass of what is asked for beside these and the reason; a command takes those of ``positional`` as
    arguments. ``preview`` is the operator's method that tells what the act would do, ``current`` the one that tells
    how it is now, to be changed: each takes what it has parameters for. ``page`` is the page that lists the targets;
    there the act is ``offered`` for a row, or beside the list for None. ``asks``: a command asks before it acts.
    """

    noun: str
    word: str
    path: str
    target: str
    fields: Any
    example: str
    page: str
    positional: tuple[str, ...] = ()
    preview: str = ""
    current: str = ""
    offered: Callable[[Any], bool] = lambda row: row is not None
    asks: bool = True

    @property
    def names(self) -> list[str]:
        """The parts of the target."""
        return re.findall(r"\{(\w+)", self.path)

    def named(self, values: Mapping[str, Any]) -> str:
        """Return the target as a sentence names it."""
        return self.target.format(**values)

    def to_type(self, values: Mapping[str, Any]) -> str:
        """Return what an operator types before the act where it can't be taken back; empty where it can."""
        return str(values[self.names[0]]) if self.grave else ""

    def taken(self, operator: Operator | type[Operator], method: str) -> list[str]:
        """Return which values a method of the operator (``preview`` or ``current``) takes."""
        return [name for name in inspect.signature(getattr(operator, method)).parameters if name != "self"]

    def look(self, operator: Operator, method: str, values: Mapping[str, Any]) -> Any:
        """Return what that method tells of the target."""
        return getattr(operator, method)(**{name: values[name] for name in self.taken(operator, method)})

    def with_databases(self, values: dict[str, Any], preview: Any) -> dict[str, Any]:
        """Return the values with the databases that a preview was made of: the act is done where it was shown."""
        return values | {name: getattr(preview, name, values[name]) for name in values.keys() & {*DATABASE_FIELDS}}

    def perform(self, operator: Operator, values: Mapping[str, Any], *, by: str | Actor, why: str) -> str:
        """Do the act, and return the sentence about it; see the operator's method for the errors."""
        return str(getattr(operator, self.name)(**values, by=by, why=why))


@cache
def form_of(act: WholeAct) -> Any:
    """Return the dataclass of all that an act is told: the parts of its target, and its fields."""
    parts = [(name, str, option(help=PARTS[name][0], most=PARTS[name][2])) for name in act.names]
    return make_dataclass(act.name, parts, bases=(act.fields,), frozen=True, kw_only=True)


def facts_of(view: Any) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Return what a preview tells a person: its facts by their names, and its rows (dataclasses) by theirs."""
    values = {each.name.replace("_", " "): getattr(view, each.name) for each in fields(view)}
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


# --- what is asked for -----------------------------------------------------------------------------------------------

_TO = (
    "Where it goes on: first, now, a position, QUEUE:POSITION,…, a time (2026-01-31T12:00:00+00:00), or how long ago "
    "(90s, 15m, 2h, 3d)."
)


@dataclass(frozen=True, kw_only=True)
class _In:
    database: str | None = option(None, "The database, where several have it.", most=1000)


@dataclass(frozen=True, kw_only=True)
class _Control(_In):
    topic: str | None = option(None, "Only what it consumes of this topic. Default: of all.", most=1000, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class _Rate(_Control):
    rate: str | None = option(
        None, "Such as 100/s, 30/min or 5/h; declared: as its handler declares.", most=40, metavar="RATE"
    )


@dataclass(frozen=True, kw_only=True)
class _Skip(_In):
    to: str = option("now", _TO, most=10_000)
    source: str | None = option(
        None, "The producer's database, where several have the topic.", most=1000, metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class _Reset(_Skip):
    to: str = option(help=_TO, most=10_000)
    skip_pruned: bool = option(False, "Accept that some of it was pruned.")


@dataclass(frozen=True, kw_only=True)
class _PauseTopic(_In):
    create: bool = option(False, "Also a topic that has no message so far.")


@dataclass(frozen=True, kw_only=True)
class _Note:
    note: str = option("", "What the next operator should know.", most=LONGEST)
    owner: str = option("", "The person or team that looks after it.", most=LONGEST, metavar="NAME")


# --- groups, topics, sessions, dead letters --------------------------------------------------------------------------

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
    permission="group:control",
    button="Pause",
    noun="group",
    word="pause",
    path="/groups/{group}/pause",
    target="group {group}",
    fields=_Control,
    page="groups",
    example="mailer",
    offered=lambda row: row.paused_at is None,
)
RESUME_GROUP = WholeAct(
    name="resume_group",
    summary="Have a paused group go on; one that its breaker has stopped tries a message at once",
    details="Each worker sees it within a second. Messages that came meanwhile are handled in order; a rate stays.",
    why="the mail provider is back",
    consequence="Workers go on where the group stopped. If its breaker is open, one message is tried at once.",
    happened="Resumed: workers go on within a second.",
    permission="group:control",
    button="Resume",
    needs_reason=False,
    noun="group",
    word="resume",
    path="/groups/{group}/resume",
    target="group {group}",
    fields=_Control,
    page="groups",
    example="mailer --topic transfer",
    offered=lambda row: bool(row.paused_at or row.opened_at),
)
SET_RATE = WholeAct(
    name="set_rate",
    summary="Have a group handle only so many messages a second, over all workers",
    details="It replaces the rate that the group's handler declares, until it is lifted again; then the declared one "
    "counts, if there is one. Each worker sees it within a second.",
    why="the provider allows 50 calls a second",
    consequence="All workers together begin no more messages of this group in a second than that.",
    happened="Written down: workers keep to it within a second.",
    permission="group:control",
    button="Set the rate",
    needs_reason=False,
    noun="group",
    word="rate",
    path="/groups/{group}/rate",
    target="group {group}",
    fields=_Rate,
    positional=("rate",),
    current="control_of",
    page="groups",
    example="mailer 50/s",
)
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
    role="admin",
    button="Reset",
    grave=True,
    noun="group",
    word="reset",
    path="/groups/{group}/{topic:path}/reset",
    target="group {group} of topic {topic}",
    fields=_Reset,
    preview="preview_reset",
    page="groups",
    example="ledger --topic transfer --to 3d",
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
    role="admin",
    button="Skip",
    grave=True,
    noun="group",
    word="skip",
    path="/groups/{group}/{topic:path}/skip",
    target="group {group} of topic {topic}",
    fields=_Skip,
    preview="preview_skip",
    page="groups",
    example="mailer --topic transfer",
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
    role="admin",
    button="Delete",
    grave=True,
    noun="group",
    word="delete",
    path="/groups/{group}/{topic:path}/delete",
    target="group {group} of topic {topic}",
    fields=_In,
    preview="preview_delete",
    page="groups",
    example="statistics --topic transfer",
)
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
    noun="topics",
    word="pause",
    path="/topics/{topic:path}/pause",
    target="topic {topic}",
    fields=_PauseTopic,
    page="groups",
    example="orders",
    offered=lambda row: row is None,
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
    noun="topics",
    word="resume",
    path="/topics/{topic:path}/resume",
    target="topic {topic}",
    fields=_In,
    page="groups",
    example="orders",
    offered=lambda row: row is not None and row.resumed_at is None,
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
    noun="topics",
    word="delete",
    path="/topics/{topic:path}/delete",
    target="topic {topic}",
    fields=_In,
    preview="preview_delete_topic",
    offered=lambda row: row is None,
    page="groups",
    example="order-created",
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
    fields=_In,
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
    fields=_Note,
    current="dead_group",
    page="dead",
    asks=False,
    example='0f3a91c2d4e5b6a7 --owner payments --note "back at noon"',
)

#: Every act on what isn't a message, by its name.
WHOLE_ACTS: Mapping[str, WholeAct] = {
    each.name: each
    for each in (
        *(PAUSE_GROUP, RESUME_GROUP, SET_RATE, RESET_GROUP, SKIP_GROUP, DELETE_GROUP),
        *(PAUSE_TOPIC, RESUME_TOPIC, DELETE_TOPIC, END, NOTE),
    )
}

#: What every act says and demands: those on messages, and the others.
DECLARATIONS: tuple[Declaration, ...] = (*ACTS.values(), *SPECIAL, *WHOLE_ACTS.values())

#: The word under which the audit has the end of a session of the console.
LOG_OUT = "log_out"

#: Every word that the audit can have as an action: the acts, and what else operators, workers and reconciliations do:
#: see an unmasked body, order or cancel a bulk job, log out of the console, quarantine a message and lift that again,
#: call the application for one that is parked, write the message or the status that was missing.
AUDITED: tuple[str, ...] = (
    *(act.name for act in DECLARATIONS),
    *("bulk", "reveal", LOG_OUT, "quarantine", "release", "on_parked", "dispatch", "sync_status"),
)


def whole_acts_of(noun: str, row: Any = None) -> list[WholeAct]:
    """Return the acts that are offered on a row of a list; without one, beside the list."""
    return [each for each in WHOLE_ACTS.values() if each.noun == noun and each.offered(row)]
