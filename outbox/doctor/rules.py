"""Do the settings fit together?"""

from __future__ import annotations

from collections.abc import Iterator

from outbox.doctor.patient import Patient, Unseen
from outbox.doctor.report import Finding, problem


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
