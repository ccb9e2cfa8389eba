"""What acts that ask for more than a yes ask for, beside their target and the reason: the fields of their forms."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args
from uuid import UUID

from outbox.acts.changes import LONGEST, MAX_ITEMS
from outbox.message.content import FEED_PATTERN, GROUP_PATTERN, MAX_FEED, MAX_GROUP
from outbox.reader import Seconds, option

_TO = (
    "Where it goes on: first, now, today or yesterday (their starts, in UTC), a time (2026-01-31T12:00:00+00:00), how "
    "long ago (90s, 15m, 2h, 3d), a position, or QUEUE:POSITION,…"
)


class TargetPart(NamedTuple):
    """A part of a target, as paths and commands name it: what it is, and what it must be like."""

    help: str
    most: int | None = None
    pattern: str | None = None
    kind: type = UUID


#: The parts of targets.
PARTS: Mapping[str, TargetPart] = {
    "group": TargetPart("The group, as `outbox group list` names it.", MAX_GROUP, GROUP_PATTERN, str),
    "topic": TargetPart("The topic, or one of its feeds (orders@1).", MAX_FEED, FEED_PATTERN, str),
    "session": TargetPart("The session, as `outbox lock list` names it.", 64, r"^[0-9a-f]+\.[0-9a-f]+$", str),
    "fingerprint": TargetPart(
        "The group of dead letters, as `outbox dead groups` names it.", 64, r"^[0-9a-f]{1,64}$", str
    ),
    "schedule": TargetPart("The reconciliation, as `outbox reconcile schedules` names it.", LONGEST, None, str),
    "cron": TargetPart("The schedule, as `outbox cron list` names it.", MAX_GROUP, GROUP_PATTERN, str),
    "run_id": TargetPart("The run, as `outbox reconcile runs` names it."),
    "message_id": TargetPart("The message."),
    "filter": TargetPart("The name of the filter.", 60, None, str),
    "rule": TargetPart("The rule, by the code that `outbox doctor` prints.", 64, r"^[a-z_]+\.[a-z_]+$", str),
    "command": TargetPart("The message of the command, as `outbox sagas show` names it."),
}


@dataclass(frozen=True, kw_only=True)
class InDatabase:
    """Name the database of an act."""

    database: str | None = option(None, "The database, where several have it.", most=1000)


@dataclass(frozen=True, kw_only=True)
class ControlFields(InDatabase):
    """Limit an act on a group to a topic."""

    topic: str | None = option(None, "Only what it consumes of this topic. Default: of all.", most=1000, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class RateFields(ControlFields):
    """Give a rate."""

    rate: str | None = option(
        None, "Such as 100/s, 30/min or 5/h; declared: as its handler declares.", most=40, metavar="RATE"
    )


@dataclass(frozen=True, kw_only=True)
class SkipFields(InDatabase):
    """Say up to where a group skips."""

    to: str = option("now", _TO, most=10_000)
    source: str | None = option(
        None, "The producer's database, where several have the topic.", most=1000, metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class ResetFields(SkipFields):
    """Say from where on a group reads again."""

    to: str = option(help=_TO, most=10_000)
    skip_pruned: bool = option(False, "Accept that some of it was pruned.")


@dataclass(frozen=True, kw_only=True)
class PauseTopicFields(InDatabase):
    """Pause a topic."""

    create: bool = option(False, "Also a topic that has no message so far.")


@dataclass(frozen=True, kw_only=True)
class NoteFields:
    """Write a note."""

    note: str = option("", "What the next operator should know.", most=LONGEST)
    owner: str = option("", "The person or team that looks after it.", most=LONGEST, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class FilteredFields:
    """Say which list a filter is of."""

    of: str = option(help="The list: messages, halves, scheduled, inbox, bulk-jobs or sagas.", most=40, metavar="LIST")


@dataclass(frozen=True, kw_only=True)
class FilterFields(FilteredFields):
    """Give a filter."""

    query: str = option(help="Its conditions, as the list's URL has them: topic=orders&status=parked.", most=4000)


@dataclass(frozen=True, kw_only=True)
class LimitFields(InDatabase):
    """Limit a silence."""

    topic: str | None = option(None, "Only of this topic.", most=1000, metavar="NAME")
    group: str | None = option(None, "Only of this group.", most=1000, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class SilenceFields(LimitFields):
    """Say for how long a rule is silenced."""

    lasts: Seconds = option(help="For how long: 90s, 15m, 2h, 3d.", above=0, most=90 * 86_400.0, metavar="TIME")
    begins: dt.datetime | None = option(None, "When it begins, for a maintenance window. Default: now.")


@dataclass(frozen=True, kw_only=True)
class LiftFields(LimitFields):
    """Say which silences of a rule are lifted."""

    planned: bool = option(False, "Also the windows that haven't begun.")


#: What becomes of the original. ``quarantine``: no group can take it any more. ``discard``: the groups that have parked
#: it won't need it, and none other may still come to it. ``leave``: nothing, so that both may take effect.
Original = Literal["quarantine", "discard", "leave"]
ORIGINALS: tuple[str, ...] = get_args(Original)
#: The longest result that an operator gives.
LONGEST_RESULT = 20_000


@dataclass(frozen=True, kw_only=True)
class EditFields:
    """Give a message another body."""

    body: str = option(help="The whole new body, as a text: JSON where it was JSON.", most=900_000, file=True)
    original: Original = option("quarantine", "What becomes of the original.")
    acknowledge_delivered: bool = option(False, "Also where a group has consumed the original.")
    again: bool = option(False, "Also where the message has a copy already.")
    version: str | None = option(None, "The version of the message that was seen.")


@dataclass(frozen=True, kw_only=True)
class OrderFields(InDatabase):
    """Order a run."""

    dry_run: bool = option(False, "Compare, and repair nothing.")
    topic: str | None = option(None, "The topic of its first pair, where there are several of this name.", most=LONGEST)
    group: str | None = option(None, "The group of its first pair, where there are several of this name.", most=LONGEST)


@dataclass(frozen=True, kw_only=True)
class RepairFields:
    """Choose what is repaired, and how."""

    kind: str | None = option(None, "Only findings of this kind.", most=LONGEST)
    messages: tuple[UUID, ...] | None = option(None, "Only those of these messages.")
    repair: str | None = option(None, "The repair, which needs the kind; else that of the run's policy.", most=LONGEST)
    rate: float | None = option(None, "At most so many a second. Default: no limit.", above=0, most=1e6, metavar="N")
    number: int | None = option(
        None, "How many the preview would repair; another number is refused.", least=0, most=MAX_ITEMS
    )


@dataclass(frozen=True, kw_only=True)
class AnswerFields:
    """Answer for a participant."""

    answer: Literal["done", "refused"] = option(help="What the participant did.")
    result: str | None = option(
        None, "The participant's reply, as JSON, where later steps need that.", most=LONGEST_RESULT, metavar="JSON"
    )
