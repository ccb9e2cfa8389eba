"""Do undecided halves find their verdict?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote
from uuid import UUID

from outbox.operator.health.doctor import sql
from outbox.operator.health.doctor.patient import ROWS, Patient, Unseen
from outbox.operator.health.doctor.report import Finding, counted, note, problem
from outbox.text import duration

# A check is late when it has been due for so many intervals.
_LATE = 2
# A half is old after so many times the time in which all its checks should have been made.
_OLD = 3
_ROWS_A_TOPIC = 1_000
_PARKED = 100_000
_TOPICS = 50


@dataclass(frozen=True, slots=True)
class _Topic:
    """A row of `store.orphans`."""

    name: str
    unfenced: int
    late: int
    unasked: int
    fenced_late: int
    overdue: float
    half_id: UUID | None
    some_asked: bool


def checks(patient: Patient) -> Iterator[Finding]:
    """Is anybody asked about those that are due? Halves with a fence need no checker, only a worker."""
    grace = _LATE * patient.settings.check_interval
    (rows,) = patient.read(sql.orphans(patient.schema, grace, _ROWS_A_TOPIC))
    late: dict[str, int] = {}
    overdue = 0.0
    for topic in (_Topic(*row) for row in rows):
        missing = _no_checker(patient, topic)
        if missing is not None:
            yield missing
        waiting = topic.fenced_late + (topic.late if missing is None else 0)
        if waiting:
            late[topic.name] = waiting
            overdue = max(overdue, topic.overdue)
    if late:
        names = ", ".join(map(repr, sorted(late)[:5])) + (" and others" if len(late) > 5 else "")
        halves = counted(sum(late.values()), "half waits", "halves wait", _ROWS_A_TOPIC)
        yield problem(
            "check.late",
            f"{halves} for a check that was due {duration(overdue)} ago, of {'topic' if len(late) == 1 else 'topics'} "
            f"{names}: no worker checks this database, or it can't keep up.",
            patient.worker("check"),
            halves=sum(late.values()), topics=sorted(late), overdue=overdue,
        )  # fmt: skip


def _no_checker(patient: Patient, topic: _Topic) -> Finding | None:
    mend = (
        f"register one with @outbox.checker({topic.name!r}), and run: {patient.worker('check')}\n"
        f"or decide one by hand: {patient.command(f'half commit|rollback {topic.half_id} --reason …')}"
    )
    if patient.checkers is not None:
        if topic.name in patient.checkers or not topic.unfenced:
            return None
        halves = counted(topic.unfenced, "undecided half", "undecided halves", _ROWS_A_TOPIC)
        return problem(
            "checker.missing",
            f"{halves} of topic {topic.name!r}, such as {topic.half_id}, can't be decided: {patient.app} registers no "
            "checker for this topic.",
            mend,
            topic=topic.name, halves=topic.unfenced, half_id=topic.half_id, overdue=topic.overdue, certain=True,
        )  # fmt: skip
    if topic.some_asked or not topic.unasked:
        return None
    halves = counted(topic.unasked, "half", "halves", _ROWS_A_TOPIC)
    return problem(
        "checker.missing",
        f"Nobody was ever asked about {halves} of topic {topic.name!r}, such as {topic.half_id}, due for a check since "
        f"{duration(topic.overdue)}: no running worker has a checker for this topic.",
        mend,
        topic=topic.name, halves=topic.unasked, half_id=topic.half_id, overdue=topic.overdue, certain=False,
    )  # fmt: skip


def oldest_undecided(patient: Patient) -> Iterator[Finding]:
    """Tell the oldest half which should have been decided or parked long ago, and why it wasn't."""
    (rows,) = patient.read(sql.oldest_undecided(patient.schema, ROWS))
    for half_id, topic, fenced, times, checked, age, overdue in rows:
        if age <= _patience(patient, topic):
            continue
        if not checked:
            state = f"was never checked, although its check was due {duration(max(overdue, 0))} ago"
        elif fenced:
            state = "its transaction still ran when it was checked last"
        else:
            state = f"its checker was asked {times} times without a verdict"
        late = overdue > _LATE * patient.settings.check_interval
        yield (problem if late else note)(
            "half.old",
            f"The oldest undecided half, {half_id} of topic {topic!r}, is {duration(age)} old, and {state}.",
            f"look at it: {patient.command(f'half show {half_id}')}\n"
            f"see that a worker checks: {patient.worker('check')}\n"
            f"or decide it: {patient.command(f'half commit|rollback {half_id} --reason …')}",
            half_id=half_id, topic=topic, age=age, overdue=overdue, checks=times, fenced=fenced, checked=checked,
        )  # fmt: skip
        return


def parked(patient: Patient) -> Iterator[Finding]:
    """Those over their checks wait for a human."""
    (((_, looked, *_), *rows),) = patient.read(sql.parked_halves(patient.schema, _PARKED, _TOPICS))
    for topic, count, age, half_id in rows:
        halves = counted(count, "half is", "halves are", _PARKED)
        yield problem(
            "half.parked",
            f"{halves} parked in topic {topic!r}, for {duration(age)} at the longest ({half_id}): all checks were used "
            "up without a verdict.",
            f"look at them: {patient.command(f'half list --status parked --topic {quote(topic)}')}\n"
            f"have them checked again: {patient.command(f'half reset --parked --topic {quote(topic)} --reason …')}\n"
            f"or decide one: {patient.command(f'half commit|rollback {half_id} --reason …')}",
            topic=topic, halves=count, age=age, half_id=half_id,
        )  # fmt: skip
    if looked == _PARKED:
        raise Unseen(f"only the oldest {_PARKED} undecided halves were looked at")
    if len(rows) == _TOPICS:
        raise Unseen(f"only the {_TOPICS} topics whose parked halves are the oldest are told")


def _patience(patient: Patient, topic: str) -> float:
    settings = patient.settings
    rules = (patient.checkers or {}).get(topic)
    if rules is None:
        return _OLD * (settings.immunity + settings.max_checks * settings.check_interval)
    return _OLD * (rules.immunity + rules.max_checks * rules.interval)
