"""The timeline of one message: each step that is on record, over all databases, in the order of time."""

from __future__ import annotations

import json
from collections.abc import Iterator

from outbox.admin.gathering import Gathered
from outbox.admin.model import Event

_ANSWERED = {"commit": "it committed", "rollback": "it rolled back", "unknown": "unknown"}
_IN_INBOX = {
    "consumed": "Consumed by",
    "failed": "Failed in",
    "parked": "Parked by",
    "rolled_back": "Fenced off in",
}


def timeline(found: Gathered) -> list[Event]:
    """Return what happened to a message; at the same moment, what comes first on its way comes first."""
    events = [*_at_producer(found), *_checks(found), *_in_inboxes(found), *_by_people(found)]
    # One statement writes half and op, and may stamp the op first.
    born = found.half["born_at"] if found.half else None
    return sorted(events, key=lambda event: event.at if born is None else max(event.at, born))


def _at_producer(found: Gathered) -> Iterator[Event]:
    if found.home is None:
        return
    name, half, op = found.home.name, found.half, found.op
    if half:
        yield Event(half["born_at"], "written", "Half message written", name, actor=half["producer_group"])
    if op:
        word = "Committed" if op["resolution"] == "commit" else "Rolled back"
        yield Event(op["decided_at"], word.lower().replace(" ", "_"), f"{word} by the {op['decided_by']}", name)
    for send in found.sends:
        again = "" if send["send_number"] == 1 else f" again (send {send['send_number']})"
        place = f"queue {send['queue']}, position {send['position']}"
        yield Event(send["visible_at"], "dispatched", f"Dispatched{again}", name, place)
    scheduled = found.scheduled or {}
    if scheduled.get("recalled_at"):
        yield Event(scheduled["recalled_at"], "recalled", "Recalled", name, actor=scheduled["recalled_by"])
    if (undoing := found.compensation) is not None:
        yield Event(
            undoing["compensated_at"],
            "compensated",
            f"Local transaction rolled back by {undoing['function']}",
            name,
            undoing["reason"],
            undoing["requested_by"],
        )


def _checks(found: Gathered) -> Iterator[Event]:
    if found.home is None:
        return
    name = found.home.name
    for check in found.history:
        answer = _ANSWERED.get(check["answer"], "no answer" if check["state"] == "no_answer" else "being asked")
        asked = "its fence" if check["asked"] == "fence" else "the checker"
        yield Event(check["asked_at"], "checked", f"Asked {asked}: {answer}", name, check["error"], check["worker"])
    if found.check and found.check["parked_at"] is not None:
        yield Event(found.check["parked_at"], "half_parked", "Half parked", name, found.check["reason"])


def _in_inboxes(found: Gathered) -> Iterator[Event]:
    for row in found.inbox:
        if row.received_at is None or row.changed_at is None:
            continue
        if row.status != "consumed" or (row.attempts or 0) > 1:
            yield Event(row.received_at, "received", f"First handled by group {row.group}", row.database)
        first_line = (row.last_error or "").partition("\n")[0] or None
        times = f" ({row.attempts} attempts)" if (row.attempts or 0) > 1 else ""
        title = f"{_IN_INBOX.get(row.status, row.status)} group {row.group}{times}"
        # What was discarded was changed by that; when it had been parked is in the audit, or nowhere.
        if row.discarded_at is None:
            yield Event(row.changed_at, row.status, title, row.database, first_line)
        else:
            yield Event(row.discarded_at, "discarded", f"Discarded in group {row.group}", row.database, first_line)


def _by_people(found: Gathered) -> Iterator[Event]:
    for act in found.audit:
        of_group = f" in group {group}" if (group := act.target.rpartition("/")[0]) else ""
        yield Event(act.acted_at, "act", f"{act.action}{of_group}", act.database, act.reason, act.actor)
    for name, finding in found.findings:
        if finding["started_at"] is not None:
            detail = None if finding["detail"] is None else json.dumps(finding["detail"], ensure_ascii=False)
            title = f"Reconciliation found it {finding['kind']} for group {finding['group']}"
            yield Event(finding["started_at"], "found", title, name, detail)
