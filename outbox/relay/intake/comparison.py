"""Compare what a broker still has with what an intake has stored here, message by message, and store what is missing.

Only what was confirmed to the broker counts: the rest is on its way. What is older than the retention isn't judged,
since a message that was consumed long ago is forgotten here. Nothing is confirmed by this, and no consumer of the
broker loses anything to it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import Template, execute
from outbox.database.session import begin
from outbox.database.sql import plan_by_index
from outbox.errors import InvalidHandler
from outbox.message.ids import derived_id
from outbox.relay.intake.intake import parts
from outbox.telemetry.events import IntakeMissing
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.relay.intake.intake import Intake
    from outbox.relay.intake.source import Confirmed
    from outbox.settings import Settings

# Prune deletes a half once its message is settled and old: so the comparison judges nothing that is as old as that.
_KNOWN: Template = Template("""
SELECT i.id FROM unnest(%(ids)s::uuid[]) AS i (id)
 WHERE EXISTS (SELECT FROM {s}.half_message h WHERE h.id = i.id AND h.topic = %(topic)s)
""")
_CLOCK: Template = Template("SELECT clock_timestamp()")
_OLDEST: Template = Template("SELECT min(born_at) FROM {s}.half_message WHERE topic = %(topic)s")
# Of the retention: prune, and the broker's clock, may be ahead.
_SHARE = 0.9
#: Missing messages that are kept to be shown; all are counted.
SHOWN = 1_000


@dataclass(frozen=True, slots=True)
class MissingMessage:
    """A message that the broker has at ``origin`` (such as ``orders[3]@1742``), since ``at``, and this database not."""

    id: UUID
    origin: str
    at: dt.datetime


@dataclass(slots=True)
class IntakeComparison:
    """What came of a comparison: how many messages the broker has, and what became of them.

    ``unjudged`` are about as old as the retention, or older, or of the time to come; or, where the source begins "now",
    older than the oldest message here. ``known`` counts what is there again among those of a page once. ``missing`` has
    the first ones, ``lost`` is how many there are, of which ``stored`` were stored now.
    """

    topic: str
    source: str
    confirmed: int = 0
    known: int = 0
    unjudged: int = 0
    lost: int = 0
    stored: int = 0
    missing: list[MissingMessage] = field(default_factory=list)


def compare(
    connection: Connection,
    settings: Settings,
    intake: Intake,
    *,
    apply: bool = False,
    done: Callable[[int], object] = lambda _: None,
) -> IntakeComparison:
    """Compare an intake with its broker; with ``apply``, store what is missing. ``done`` is told how many it has seen.

    Raises:
        InvalidHandler: the source can't be read again.
        Exception: of the broker's client, or of the database.
    """
    source: Any = intake.source
    if not callable(getattr(source, "confirmed", None)):
        raise InvalidHandler(
            f"intake of {intake.topic!r}: source {intake.source.name!r} can't give what it has given before (it has no "
            "method `confirmed`): a queue of RabbitMQ forgets what was confirmed"
        )
    found = IntakeComparison(intake.topic, intake.source.name)
    with begin(connection):
        now: dt.datetime = execute(connection, _CLOCK(settings.schema))[0][0][0]
        since = now - dt.timedelta(seconds=settings.retention * _SHARE)
        if getattr(source, "start", "first") != "first":  # what was left out isn't missing
            oldest = execute(connection, _OLDEST(settings.schema, topic=intake.topic))[0][0][0]
            since = max(since, oldest or now)
    lost: set[UUID] = set()
    for page in source.confirmed():
        found.confirmed += len(page)
        judged = [each for each in page if since <= each.at <= now]
        found.unjudged += len(page) - len(judged)
        for part in parts(judged, lambda each: len(each.received.body)):
            _compared(connection, settings, intake, part, found, lost, apply=apply)
        done(found.confirmed)
    found.lost = len(lost)
    return found


def _compared(
    connection: Connection,
    settings: Settings,
    intake: Intake,
    confirmed: Sequence[Confirmed],
    found: IntakeComparison,
    lost: set[UUID],
    *,
    apply: bool,
) -> None:
    ids = {intake.name_of(each.received)[0]: each for each in confirmed}
    # A message that another topic here has already has an id that follows from its own.
    derived = {derived_id(id_, intake.topic): id_ for id_ in ids}
    with begin(connection):
        known = _KNOWN(settings.schema, ids=[*ids, *derived], topic=intake.topic)
        *_, rows = execute(connection, plan_by_index(), known)
        there = {derived.get(id_, id_) for (id_,) in rows}
        missing = {id_: each for id_, each in ids.items() if id_ not in there}
        if apply and missing:
            intake.store(connection, settings.schema, [each.received for each in missing.values()])
            found.stored += len(missing)
    found.known += len(ids) - len(missing)
    for id_, each in missing.items():
        if id_ in lost:
            continue
        lost.add(id_)
        origin = each.received.origin
        emit(IntakeMissing(topic=intake.topic, source=intake.source.name, origin=origin, message_id=id_, stored=apply))
        if len(found.missing) < SHOWN:
            found.missing.append(MissingMessage(id_, origin, each.at))
