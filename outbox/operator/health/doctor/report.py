"""What the doctor says: findings, and what was looked at.

Do the settings fit together?
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outbox.operator.health.doctor.patient import Patient, Unseen


class Severity(enum.StrEnum):
    """How bad a finding is: a problem wants mending; a note is worth knowing, and may be as it should be."""

    PROBLEM = "problem"
    NOTE = "note"


class Outcome(enum.StrEnum):
    """What came of a look; skipped: it could not be done, or only in part, and then found nothing."""

    OK = "ok"
    FINDING = "finding"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    ``code`` is stable, for programs. ``mend`` says which command, SQL or change mends it; each further line is another
    step, or another way. ``details`` are the numbers and names of the sentence; durations are seconds. No finding shows
    a body, a query or a password.
    """

    code: str
    severity: Severity
    sentence: str
    mend: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Looked:
    """One thing that was looked at, and what came of it; ``why`` it was skipped, or seen only in part."""

    name: str
    outcome: Outcome
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found in one database; ``at`` is its time. Problems come first."""

    database: str
    schema: str
    at: dt.datetime
    findings: tuple[Finding, ...]
    looked: tuple[Looked, ...]

    @property
    def healthy(self) -> bool:
        """Is there no problem? Notes don't count."""
        return all(finding.severity is not Severity.PROBLEM for finding in self.findings)


def problem(code: str, sentence: str, mend: str, **details: Any) -> Finding:
    """Return a finding that wants mending."""
    return Finding(code, Severity.PROBLEM, sentence, mend, details)


def note(code: str, sentence: str, mend: str, **details: Any) -> Finding:
    """Return a finding that may be as it should be."""
    return Finding(code, Severity.NOTE, sentence, mend, details)


def counted(count: int, one: str, several: str, limit: int | None = None) -> str:
    """Return a number with its noun; "at least" where counting stopped at ``limit``."""
    return f"{'at least ' if limit is not None and count >= limit else ''}{count} {one if count == 1 else several}"


def settings(patient: Patient) -> Iterator[Finding]:
    """Settings that contradict each other are refused wherever they are read: nothing starts with them."""
    if patient.refused is not None:
        yield problem(
            "settings.refused",
            f"The settings are refused, so that nothing starts with them: {patient.refused}.",
            "change the OUTBOX_… variable (or the argument of Settings) that the sentence names\n"
            "everything else was looked at with the defaults",
            error=str(patient.refused),
        )


def consumers(patient: Patient) -> Iterator[Finding]:
    """A consumer's own retries may last longer than those of the settings, for which the inbox was made to remember."""
    if patient.subscriptions is None:
        raise Unseen("the application and its consumers aren't known")
    known = patient.settings
    for each in patient.subscriptions:
        horizon = sum(each.retry_delays) * (1 + known.retry_jitter)
        needed = known.retention + horizon
        if known.inbox_retention < needed:
            yield problem(
                "settings.retries",
                f"Group {each.group!r} of topic {each.topic!r} retries for {horizon:.0f} s, so a message can come "
                f"{needed:.0f} s after it was dispatched, and the inbox forgets after {known.inbox_retention:.0f} s.",
                f"set inbox_retention (OUTBOX_INBOX_RETENTION) to at least {needed:.0f}, or give fewer retry_delays",
                group=each.group, topic=each.topic, retries=horizon, inbox_retention=known.inbox_retention,
                needed=needed,
            )  # fmt: skip
