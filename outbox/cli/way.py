"""The way of one message as tables for people."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

from outbox.cli.output import cell, table

if TYPE_CHECKING:
    from rich.table import Table

    from outbox.messages import Way

Event = tuple[dt.datetime | None, str, str]

_NEVER = dt.datetime.max.replace(tzinfo=dt.UTC)


def story(way: Way, body: Any = None) -> list[Table]:
    """Return the message, what happened to it in order of time, and where each group stands."""
    tables = [_message(way, body), table(("when", "what", "detail"), _events(way), "What happened")]
    if way.inbox:
        tables.append(_inboxes(way))
    return tables


def _message(way: Way, body: Any) -> Table:
    half = way.half or {"status": "not in this database (pruned, or never here)"}
    rows = [("id", way.id), *((name.replace("_", " "), half[name]) for name in half if name not in {"id", "born_at"})]
    if body is not None:
        rows.append(("body", body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)))
    return table(("message", ""), [row for row in rows if row[1] is not None])


def _events(way: Way) -> list[Event]:
    events: list[Event] = []
    if way.half:
        events.append((way.half["born_at"], "half message", f"written by {way.half['producer_group']}"))
    if check := way.check:
        events += _checks(check)
    if op := way.op:
        events.append((op["decided_at"], op["resolution"], f"by the {op['decided_by']}"))
    if scheduled := way.scheduled:
        events.append((scheduled["deliver_at"], "due", "scheduled"))
        if scheduled["recalled_at"]:
            events.append((scheduled["recalled_at"], "recalled", f"by {scheduled['recalled_by']}"))
    for send in way.sends:
        detail = f"queue {send['queue']}, position {send['position']}"
        events.append((send["visible_at"], "message" if send["send_number"] == 1 else "resent", detail))
    for row in way.inbox:
        if row["received_at"]:
            events.append((row["received_at"], f"inbox of {row['group']}", "first attempt ended"))
            if row["changed_at"] != row["received_at"]:
                events.append((row["changed_at"], f"inbox of {row['group']}", f"{row['status']}"))
    if done := way.compensation:
        events.append((done["compensated_at"], "compensated", f"{done['function']}, asked by {done['requested_by']}"))
    for act in way.audit:
        events.append((act["acted_at"], act["action"], f"by {act['actor']}: {act['reason'] or 'no reason given'}"))
    # A message that is sent gets its op within the statement that writes the half, and may get its time first.
    born = way.half["born_at"] if way.half else dt.datetime.min.replace(tzinfo=dt.UTC)
    return sorted(events, key=lambda event: max(event[0] or _NEVER, born))


def _checks(check: dict[str, Any]) -> list[Event]:
    events: list[Event] = []
    if check["check_times"]:
        detail = f"number {check['check_times']}: {check['last_answer'] or check['last_error'] or 'no answer'}"
        events.append((check["checked_at"], "check", detail))
    if check["parked_at"]:
        events.append((check["parked_at"], "parked", str(check["reason"])))
    else:
        fence = "by its fence" if check["fenced"] else "by its checker"
        events.append((check["next_check_at"], "next check", f"{fence}, after {check['check_times']} checks"))
    return events


def _inboxes(way: Way) -> Table:
    rows = [
        (
            row["group"],
            row["status"],
            row["attempts"],
            row["next_attempt_at"],
            f"queue {row['queue']}, position {row['position']}" if row["position"] is not None else "",
            cell(row["last_error"]).partition("\n")[0],
        )
        for row in way.inbox
    ]
    return table(("group", "status", "attempts>", "next attempt", "where", "last error"), rows, "Inboxes")
