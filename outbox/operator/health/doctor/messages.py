"""Do committed messages reach their consumers, and is what is settled deleted in the end?"""

from __future__ import annotations

from collections.abc import Iterator

from outbox.dispatch.sql import newest_cursor, to_cursor
from outbox.operator.health.doctor import sql
from outbox.operator.health.doctor.patient import ROWS, Patient
from outbox.operator.health.doctor.report import Finding, counted, problem
from outbox.operator.health.stats_sql import undispatched as count_undispatched
from outbox.text import duration

# Prune comes round every prune_interval; what is left after so many, and after this time in any case, is left for good.
_PRUNE_ROUNDS = 10
_PRUNE_AT_LEAST = 3600.0
_PRUNE_ROWS = 1_000
# A group is too far behind when so much of the retention is over.
_TOO_FAR = 0.5


def undispatched(patient: Patient) -> Iterator[Finding]:
    """Ops are dispatched as soon as any worker is there."""
    (cursors,) = patient.read(newest_cursor(patient.schema))
    cursor = to_cursor(cursors[0]) if cursors else None
    (rows,) = patient.read(count_undispatched(patient.schema, cursor, ROWS))
    oldest = max((age for _, _, age in rows), default=0.0)
    if oldest > patient.limits.undispatched:
        count = sum(row[1] for row in rows)
        yield problem(
            "op.undispatched",
            f"{counted(count, 'message', 'messages', ROWS)} committed {duration(oldest)} ago at the earliest "
            f"{'is' if count == 1 else 'are'} not dispatched: no worker dispatches this database, or it can't keep up.",
            patient.worker("dispatch,release"),
            messages=count, oldest=oldest, topics=sorted(topic for topic, *_ in rows),
        )  # fmt: skip


def scheduled(patient: Patient) -> Iterator[Finding]:
    """Scheduled messages are released when their time has come."""
    (((count, late),),) = patient.read(sql.overdue_scheduled(patient.schema, patient.limits.undispatched, ROWS))
    if count:
        yield problem(
            "message.overdue",
            f"{counted(count, 'scheduled message', 'scheduled messages', ROWS)} should have been released, the first "
            f"{duration(late)} ago: no worker releases them, or it can't keep up.",
            patient.worker("dispatch,release"),
            messages=count, overdue=late,
        )  # fmt: skip


def unpruned(patient: Patient) -> Iterator[Finding]:
    """What is settled and older than the retention is deleted by a worker's prune."""
    settings = patient.settings
    grace = max(_PRUNE_ROUNDS * settings.prune_interval, _PRUNE_AT_LEAST)
    (((count, age),),) = patient.read(sql.unpruned(patient.schema, settings.retention + grace, _PRUNE_ROWS))
    if count:
        halves = counted(count, "half", "halves", _PRUNE_ROWS)
        yield problem(
            "prune.behind",
            f"{halves} decided {duration(age)} ago at the earliest should have been deleted after the retention of "
            f"{duration(settings.retention)}: no worker prunes, or with another retention.",
            f"{patient.worker('prune')}\nsee that the doctor reads the same OUTBOX_RETENTION as the workers",
            halves=count, oldest=age, retention=settings.retention,
        )  # fmt: skip


def parked(patient: Patient) -> Iterator[Finding]:
    """Messages over their attempts wait for a human."""
    (rows,) = patient.read(sql.groups(patient.schema, patient.limits.retry, ROWS))
    for group, topic, count, age, message_id, *_ in rows:
        if count:
            messages = counted(count, "message is", "messages are", ROWS)
            yield problem(
                "message.parked",
                f"{messages} parked in group {group!r} of topic {topic!r}, for {duration(age)} at the longest "
                f"({message_id}).",
                f"look at it: {patient.command(f'messages show {message_id}')}\ngive it back to the group: "
                f"outbox.retry({group!r}, UUID('{message_id}'), actor=…, reason=…)",
                group=group, topic=topic, messages=count, age=age, message_id=message_id,
            )  # fmt: skip


def retries(patient: Patient) -> Iterator[Finding]:
    """A failed message is tried again when its time has come, if a worker of its group is there."""
    (rows,) = patient.read(sql.groups(patient.schema, patient.limits.retry, ROWS))
    for group, topic, *_, count, late in rows:
        if count:
            due = counted(count, "retry", "retries", ROWS)
            yield problem(
                "retry.overdue",
                f"{due} of group {group!r} of topic {topic!r} should have been made, the first {duration(late)} ago: "
                "no worker runs this group, or it can't keep up.",
                patient.worker("consume,retry"),
                group=group, topic=topic, messages=count, overdue=late,
            )  # fmt: skip


def unread(patient: Patient) -> Iterator[Finding]:
    """Messages are kept for the retention; a group that comes later misses them. Only where both sides are here."""
    retention = patient.settings.retention
    (rows,) = patient.read(sql.unread(patient.schema))
    for group, topic, gaps, age in rows:
        schema = f'"{patient.schema}"'
        gone = (
            f"if the group is gone for good: DELETE FROM {schema}.consumer_offset WHERE consumer_group = "
            f"{_literal(group)} AND topic = {_literal(topic)};"
        )
        if gaps:
            yield problem(
                "group.pruned",
                f"Messages of topic {topic!r} were pruned before group {group!r} had read them, in "
                f"{counted(gaps, 'queue', 'queues')}: the group stops there.",
                "find out what they were, let the group go on with on_pruned='skip', and keep messages longer "
                f"(OUTBOX_RETENTION)\n{gone}",
                group=group, topic=topic, queues=gaps, behind=age,
            )  # fmt: skip
        elif age > _TOO_FAR * retention:
            yield problem(
                "group.behind",
                f"Group {group!r} is {duration(age)} behind in topic {topic!r}, whose messages are kept for "
                f"{duration(retention)}: soon they are pruned before it has read them.",
                f"{patient.worker('consume,retry')}\nor keep messages longer (OUTBOX_RETENTION)\n{gone}",
                group=group, topic=topic, behind=age, retention=retention,
            )  # fmt: skip


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
