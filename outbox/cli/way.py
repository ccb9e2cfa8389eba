"""The way of one message, or of one half, as tables for people."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.cli.output import table

if TYPE_CHECKING:
    from rich.table import Table

    from outbox.operator.old_halves import HalfView
    from outbox.operator.old_messages import Way

Event = tuple[dt.datetime | None, str, str]

_NEVER = dt.datetime.max.replace(tzinfo=dt.UTC)


def story(way: Way, body: Any = None) -> list[Table]:
    """Return the message, what happened to it in order of time, and where each group stands."""
    tables = [_message(way, body), table(("when", "what", "detail"), _events(way), "What happened")]
    if way.inbox:
        tables.append(_inboxes(way))
    return tables


def story_of_half(view: HalfView, body: Any = None) -> list[Table]:
    """Return the half and how it stands, its checks, and what operators did."""
    tables = [_facts("half", view.id, _half(view), body)]
    if view.history:
        checks = [
            (
                entry["asked_at"],
                entry["asked"],
                answer_of(entry),
                "" if entry["seconds"] is None else f"{entry['seconds']:.3f}",
                first_line(entry["error"]),
                entry["worker"],
            )
            for entry in view.history
        ]
        tables.append(table(("when", "asked", "answer", "seconds>", "error", "worker"), checks, "Checks"))
    if view.audit:
        acts = [(act["acted_at"], act["actor"], act["action"], act["reason"], act["result"]) for act in view.audit]
        tables.append(table(("when", "who", "did", "why", "result"), acts, "What operators did"))
    return tables


def first_line(text: str | None) -> str:
    """Return what an error says, without its traceback."""
    return (text or "").partition("\n")[0]


def answer_of(check: dict[str, Any]) -> str:
    """Return the answer of an entry of the history, or why there is none."""
    return str(check["answer"] or {"being_asked": "(being asked)", "no_answer": "(no answer)"}[check["state"]])


def _half(view: HalfView) -> dict[str, Any]:
    facts = {"status": view.status, **(view.half or {})}
    if check := view.check:
        facts |= {"fenced": check["fenced"], "checks": check["check_times"], "parked_at": check["parked_at"]}
        facts |= {"reason": check["reason"]} if check["parked_at"] else {"next_check_at": check["next_check_at"]}
    if op := view.op:
        facts |= {"decided_by": op["decided_by"], "decided_at": op["decided_at"]}
    return facts


def _facts(title: str, id_: UUID, facts: dict[str, Any], body: Any) -> Table:
    rows = [("id", id_), *((name.replace("_", " "), facts[name]) for name in facts if name != "id")]
    if body is not None:
        rows.append(("body", body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)))
    return table((title, ""), [row for row in rows if row[1] is not None])


def _message(way: Way, body: Any) -> Table:
    half = way.half or {"status": "not in this database (pruned, or never here)"}
    return _facts("message", way.id, {name: half[name] for name in half if name != "born_at"}, body)


def _events(way: Way) -> list[Event]:
    events: list[Event] = []
    if way.half:
        events.append((way.half["born_at"], "half message", f"written by {way.half['producer_group']}"))
    events += [(entry["asked_at"], "check", _check(entry)) for entry in way.history]
    if check := way.check:
        events.append(_next(check))
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


def _check(entry: dict[str, Any]) -> str:
    error = first_line(entry["error"])
    return f"by its {entry['asked']}: {answer_of(entry)}{f', {error}' if error else ''}"


def _next(check: dict[str, Any]) -> Event:
    if check["parked_at"]:
        return check["parked_at"], "parked", str(check["reason"])
    fence = "by its fence" if check["fenced"] else "by its checker"
    return check["next_check_at"], "next check", f"{fence}, after {check['check_times']} checks"


def _inboxes(way: Way) -> Table:
    rows = [
        (
            row["group"],
            row["status"],
            row["attempts"],
            row["next_attempt_at"],
            f"queue {row['queue']}, position {row['position']}" if row["position"] is not None else "",
            first_line(row["last_error"]),
        )
        for row in way.inbox
    ]
    return table(("group", "status", "attempts>", "next attempt", "where", "last error"), rows, "Inboxes")
