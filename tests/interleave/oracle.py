"""What must be true after any order of the steps of any flows, when the system has come to rest.

The rules are those of the plan: a half is undecided if and only if it has no op; a message exists if and only if its op
is a commit, once a send; positions are dense; the effect is there exactly once; nothing is lost; a message is never
both compensated and consumed; a key keeps its order; an act has its audit row; the loser of a race is told; the
producer knows what became of each message, and learns it once.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from outbox.delivery.confirm_pass import ACTOR as CONFIRM
from outbox.delivery.known_group import CALLBACK_OF
from outbox.message.model import NUMBER_BITS, Decision, Resolution
from tests.interleave.explore import Outcome
from tests.interleave.flows import FlowKind, Meeting
from tests.interleave.stepping import short
from tests.interleave.world import World

_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def judge(world: World, meeting: Meeting, outcomes: Sequence[Outcome]) -> list[str]:
    """Let a world come to rest; return what isn't true then."""
    try:
        world.rest()
    except Exception as error:
        return [f"a pass fails: {error!r}"]
    state = world.state()
    judges = (_halves, _messages, _money, _inbox, _compensated, _order, _acts, _sagas)
    wrong = [text for each in judges for text in each(state)]
    if any(flow.name.startswith("confirm") for flow in meeting.flows):
        wrong += _delivered(state)
    for flow, outcome in zip(meeting.flows, outcomes, strict=True):
        wrong += _answered(flow, outcome, state)
    if not any(outcome.hurt for outcome in outcomes):
        wrong += _unhurt(world, state)
    return wrong


def _rows(state: dict[str, Any], name: str) -> dict[str, Any]:
    return state[name] or {}


def _list(state: dict[str, Any], name: str) -> list[Any]:
    return state[name] or []


def _halves(state: dict[str, Any]) -> Iterator[str]:
    """Undecided if and only if there is no op; then there is a check, and else there is none."""
    halves, ops, checks = _rows(state, "half"), _rows(state, "op"), _rows(state, "check")
    for half_id in ops.keys() - halves.keys():
        yield f"op without a half: {short(half_id)}"
    for half_id in halves:
        if half_id not in ops and half_id not in checks:
            yield f"undecided, and nobody checks it: {short(half_id)}"
        if half_id in ops and half_id in checks:
            yield f"decided, and to be checked: {short(half_id)}"
        if half_id not in ops and not checks.get(half_id, {}).get("parked"):
            yield f"undecided at rest: {short(half_id)}"
    for half_id in checks.keys() - halves.keys():
        yield f"check without a half: {short(half_id)}"
    answered = {(row["id"], row["answer"]) for row in _list(state, "history")}
    for half_id, answer in answered:
        if answer in {"commit", "rollback"} and ops.get(half_id, {}).get("resolution") != answer:
            yield f"answered {answer}, and the op says {ops.get(half_id)}: {short(half_id)}"
    for half_id, op in ops.items():
        if op["by"] == "check" and (half_id, op["resolution"]) not in answered:
            yield f"decided by a check that has no history: {short(half_id)}"


def _messages(state: dict[str, Any]) -> Iterator[str]:
    """Messages are the committed ops, each send once; positions are dense."""
    ops, scheduled = _rows(state, "op"), _rows(state, "scheduled")
    sends: dict[str, list[int]] = defaultdict(list)
    positions: dict[int, list[int]] = defaultdict(list)
    for row in _list(state, "message"):
        sends[row["id"]].append(row["send"])
        # Dense in a queue over all epochs of the log.
        positions[row["queue"]].append(row["position"] % (1 << NUMBER_BITS))
    for half_id, numbers in sends.items():
        if ops.get(half_id, {}).get("resolution") != "commit":
            yield f"a message that isn't committed: {short(half_id)}"
        if sorted(numbers) != list(range(1, len(numbers) + 1)):
            yield f"sends of {short(half_id)}: {numbers}"
        if half_id in scheduled:
            yield f"a message and a schedule, or a recall: {short(half_id)}"
    for half_id, op in ops.items():
        if op["resolution"] == "commit" and half_id not in sends and scheduled.get(half_id) is None:
            yield f"lost: committed, and no message: {short(half_id)}"
        if op["resolution"] == "rollback" and half_id in scheduled:
            yield f"rolled back, and scheduled: {short(half_id)}"
    for queue, there in positions.items():
        if there != list(range(there[0], there[0] + len(there))):
            yield f"positions of queue {queue}: {there}"


def _money(state: dict[str, Any]) -> Iterator[str]:
    """A business change stands beside its message, or neither does; money is neither made nor lost."""
    transfers, refunds = _list(state, "transfer"), _list(state, "refund")
    if state["balance"] != 1000 - len(transfers) + len(refunds):
        yield f"balance {state['balance']} with {len(transfers)} transfers and {len(refunds)} refunds"
    halves, ops = _rows(state, "half"), _rows(state, "op")
    kinds: dict[str, list[str]] = defaultdict(list)
    for row in transfers:
        kinds[row["id"]].append(row["kind"])
    fenced = len([row for row in transfers if row["kind"] == "fenced"])
    for half_id in halves:
        if half_id not in kinds:
            # Only a fenced function's half stands without its business change.
            op = ops.get(half_id)
            fenced -= op is not None and op["resolution"] == "commit"
            if op is not None and op["resolution"] == "commit" and op["by"] != "producer":
                yield f"committed by the {op['by']}, and its business change was never made: {short(half_id)}"
    if fenced:
        yield f"fenced business changes without a commit, less commits without a change: {fenced}"
    for half_id, of_half in kinds.items():
        if half_id is None or half_id == "None":
            continue
        within = of_half.count("within")
        op = ops.get(half_id)
        if within and (within > 1 or not op or (op["resolution"], op["by"]) != ("commit", "producer")):
            yield f"committed within {within} transactions beside the decision {op}: {short(half_id)}"
        if half_id not in halves and "old" not in of_half:
            yield f"lost: a business change without its half: {short(half_id)}"


def _inbox(state: dict[str, Any]) -> Iterator[str]:
    """Each message is settled in the inbox, and took effect exactly once if it says consumed."""
    inbox, effects = _rows(state, "inbox"), Counter(row["id"] for row in _list(state, "effect"))
    for half_id in {row["id"] for row in _list(state, "message")}:
        if half_id not in inbox:
            yield f"lost: a message that the group has no row of: {short(half_id)}"
    for half_id, row in inbox.items():
        if row["status"] not in {"consumed", "parked", "quarantined"}:
            yield f"inbox says {row['status']} at rest: {short(half_id)}"
        if effects[half_id] != (row["status"] == "consumed"):
            yield f"{row['status']}, and took effect {effects[half_id]} times: {short(half_id)}"
        if row["status"] == "parked" and "seed" not in str(row) and row["attempts"] > 4:
            yield f"parked after {row['attempts']} attempts ({row['error']}): {short(half_id)}"
    old = {row["id"] for row in _list(state, "transfer") if row["kind"] == "old"}
    for half_id, number in effects.items():
        if number > 1:
            yield f"took effect {number} times: {short(half_id)}"
        if half_id not in inbox and half_id not in old:
            yield f"took effect, and the inbox doesn't know: {short(half_id)}"


def _compensated(state: dict[str, Any]) -> Iterator[str]:
    """Compensated once, and then never consumed."""
    compensated, refunds = _list(state, "compensation"), Counter(_list(state, "refund"))
    effects = {row["id"] for row in _list(state, "effect")}
    if refunds != Counter(compensated):
        yield f"compensated: {compensated}, given back: {dict(refunds)}"
    for half_id in set(compensated) & effects:
        yield f"compensated, and consumed: {short(half_id)}"
    for row in _list(state, "items"):
        if (row["state"] == "done") != (row["id"] in compensated):
            yield f"item {row['state']} ({row['outcome']}), compensated: {row['id'] in compensated}"
        if row["state"] == "pending":
            yield f"a compensation that never ends: {row['outcome']}"
    for half_id, row in _rows(state, "inbox").items():
        if row["status"] == "quarantined" and half_id not in compensated:
            yield f"quarantined for nothing: {short(half_id)}"


def _order(state: dict[str, Any]) -> Iterator[str]:
    """Messages of one key that locks put in order take effect in that order, but for those that failed."""
    sent = [row["id"] for row in _list(state, "transfer") if row["kind"] == "send"]
    plain = {row["id"] for row in _list(state, "effect") if row["attempt"] == 1 and row["send"] == 1}
    first = [row["id"] for row in _list(state, "effect") if row["id"] in plain and row["id"] in sent]
    if first != [half_id for half_id in sent if half_id in set(first)]:
        yield f"order of the key: sent {[short(each) for each in sent]}, effects {[short(each) for each in first]}"


def _acts(state: dict[str, Any]) -> Iterator[str]:
    """An act stands if and only if its audit row does."""
    audits: dict[str, list[Any]] = defaultdict(list)
    for row in _list(state, "audit"):
        audits[row["action"]].append(row)
    again = [row for row in _list(state, "message") if row["send"] > 1]
    if len(again) != len(audits["resend"]):
        yield f"{len(again)} resends, {len(audits['resend'])} recorded"
    recalled = [by for by in _rows(state, "scheduled").values() if by]
    if len(recalled) != len(audits["recall"]):
        yield f"{len(recalled)} recalled, {len(audits['recall'])} recorded"
    decided = [op for op in _rows(state, "op").values() if op["by"] == "operator"]
    if len(decided) != len(audits["rollback"]) + len(audits["commit"]):
        yield f"operators decided {len(decided)}, recorded {len(audits['rollback']) + len(audits['commit'])}"
    if len(_list(state, "compensation")) != len(audits["compensate"]):
        yield f"{len(_list(state, 'compensation'))} compensated, {len(audits['compensate'])} recorded"
    if len(audits["dispatch"]) > 1:
        yield "placed twice"
    if len([row for row in audits["resend"] if row["actor"] == "night"]) > 1:
        yield "repaired twice"


def _sagas(state: dict[str, Any]) -> Iterator[str]:
    """A saga ends, and its participant was asked once, whatever its owner has forgotten: a command has its id again."""
    bookings = Counter(row["flow"] for row in _list(state, "booking"))
    for flow_id, status in _rows(state, "saga").items():
        if (status, bookings[flow_id]) != ("completed", 1):
            yield f"saga {status} at rest, booked {bookings[flow_id]} times: {short(flow_id)}"
    topics = Counter(row["topic"] for row in _list(state, "command"))
    if max(topics.values(), default=1) > 1:
        yield f"messages of a saga: {dict(topics)}"


def _delivered(state: dict[str, Any]) -> Iterator[str]:
    """The producer knows of each message what its inbox says, and its callbacks were called once for each kind."""
    inbox, known = _rows(state, "inbox"), defaultdict[str, list[Any]](list)
    for row in _list(state, "delivery"):
        known[row["id"]].append(row)
    told = Counter((row["id"], row["status"]) for row in _list(state, "told"))
    for half_id in {row["id"] for row in _list(state, "message")}:
        rows, status = known[half_id], inbox.get(half_id, {}).get("status")
        if [row["number"] for row in rows] != list(range(1, len(rows) + 1)):
            yield f"numbers of deliveries {[row['number'] for row in rows]}: {short(half_id)}"
        newest = rows[-1] if rows else {}
        if newest.get("status") != status:
            yield f"the inbox says {status}, and the producer knows {newest.get('status')}: {short(half_id)}"
        if newest.get("settled") != (status in {"consumed", "quarantined"}):
            yield f"{status}, and settled: {newest.get('settled')}: {short(half_id)}"
        first = {
            CALLBACK_OF[each["status"]]: each["status"] for each in reversed(rows) if each["status"] in CALLBACK_OF
        }
        called = Counter((half_id, each) for each in first.values())
        if called != Counter({key: times for key, times in told.items() if key[0] == half_id}):
            yield f"callbacks {dict(called)}, the producer was told {dict(told)}: {short(half_id)}"
        if status == "consumed" and (half_id, status) not in called:
            yield f"consumed, and the producer isn't told: {short(half_id)}"
    for (half_id, status), times in told.items():
        if times > 1:
            yield f"told {times} times that it is {status}: {short(half_id)}"


def _answered(flow: FlowKind, outcome: Outcome, state: dict[str, Any]) -> Iterator[str]:
    """A flow that nobody hurt ends well or with a definite answer, and that is true."""
    error = outcome.error
    if outcome.hurt is None and error is not None and not isinstance(error, flow.expects):
        yield f"{flow.name} fails: {error!r}"
    found = outcome.result
    if error is None and isinstance(found, Decision):
        op = _rows(state, "op").get(str(found.half_id), {})
        if (op.get("resolution"), op.get("by")) != (found.resolution.value, found.decided_by):
            yield f"{flow.name} is told {found.resolution} by {found.decided_by}, and the op says {op}"
        wanted = Resolution.COMMIT if flow.name == "commit" else Resolution.ROLLBACK
        if found.resolution is not wanted:
            yield f"{flow.name} isn't told that it lost"
    if error is None and flow.name in {"send", "prepare"} and str(found) not in _rows(state, "half"):
        yield f"{flow.name} is told that {short(found)} is committed, and there is no half"
    audited = {(row["action"], str(row["target"]).rpartition("/")[2]) for row in _list(state, "audit")}
    names = {"give_back": "retry", "refuse": "rollback", "park": "park", "recall": "recall", "resend": "resend"}
    if error is None and isinstance(found, str) and flow.name in names:
        done = names[flow.name], next(iter(_ID.findall(found)), "")
        if done not in audited:
            yield f"{flow.name} is done ({found}), and not recorded"


def _unhurt(world: World, state: dict[str, Any]) -> Iterator[str]:
    """Where nobody was hurt, nothing is done twice: no question put, no handler run."""
    asked = Counter(row["id"] for row in _list(state, "history"))
    for half_id, times in asked.items():
        if times > 1 and not any(row["answer"] == "unknown" for row in _list(state, "history")):
            yield f"asked {times} times: {short(half_id)}"
    again = Counter(str(row["target"]) for row in _list(state, "audit") if row["actor"] == CONFIRM)
    for target, times in again.items():
        if times > 1 or str(world.subjects.get("missing")) not in target:
            yield f"sent again {times} times, though it isn't lost any more: {target}"
    inbox = _rows(state, "inbox")
    for message_id, times in world.calls.items():
        row = inbox.get(str(message_id), {})
        # A worker whose handler has failed lets go of the queue before it records that, so that a message which fails
        # may be handled by two; one that doesn't fail may not.
        if times > 1 and (row.get("status"), row.get("attempts")) == ("consumed", 1) and not _list(state, "items"):
            yield f"handled {times} times, though it never failed: {short(message_id)}"
