"""What operators order of reconciliations: that one is run now, and that what a run has found is repaired.

A run is ordered by a message to the workers that have the reconciliation, in the database that has its record; a repair
by a bulk job, whose items are the findings. So an order needs neither the producer's database nor a library of the
extra.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.acts.changes import MAX_ITEMS, Actor, checked_actor, record_of
from outbox.acts.whole_acts import RECONCILE, REPAIR
from outbox.database.execute import execute, lock_key, query, statement
from outbox.database.sql import plan_by_index, take_lock
from outbox.errors import ActRefused, BulkJobTooLarge, InvalidRequest, SelectorChanged
from outbox.message.model import uuid7
from outbox.operator.bulk.jobs import BulkJobs, check_order
from outbox.operator.databases import Database
from outbox.operator.model import MAX_IDS, BulkJob
from outbox.reconcile.job import LABELED, Repair
from outbox.reconcile.record.timetable import TOPIC, RunRequest
from outbox.reconcile.record.views import SETTLED, Reconciliations, Run, Schedule
from outbox.text import counted

if TYPE_CHECKING:
    from sqlalchemy import Connection

_SAMPLE = 5
_WAITS = "no living worker with the role reconcile has a reconciliation of this topic and group"


@dataclass(frozen=True, slots=True)
class RunOrder:
    """A run that was ordered, and that no worker has taken yet; ``dry_run``: without repairs."""

    database: str
    id: UUID
    schedule: str
    topic: str
    group: str
    dry_run: bool
    requested_by: str
    reason: str
    created_at: dt.datetime


@dataclass(frozen=True, slots=True)
class RepairSelection:
    """Which findings of a run are repaired, and how.

    ``kind`` None: of every kind; ``messages`` None: all of them. ``repair`` None: as the policy of the run has it, and
    what that only reports is left out; a repair that is named needs the kind.

    Raises:
        InvalidRequest: no such kind, a repair that can't mend it, or too many messages.
    """

    run: UUID
    kind: str | None = None
    messages: tuple[UUID, ...] | None = None
    repair: str | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in LABELED:
            raise InvalidRequest(f"kind {self.kind!r} must be one of: {', '.join(LABELED)}", field="kind")
        if self.repair is not None and self.repair not in self.choices:
            of = f"that mend {self.kind}: {', '.join(self.choices) or 'there are none'}" if self.kind else "of a kind"
            raise InvalidRequest(f"repair {self.repair!r} must be one of those {of}", field="repair")
        if self.messages is not None and not 0 < len(self.messages) <= MAX_IDS:
            raise InvalidRequest(f"name 1 to {MAX_IDS} messages, not {len(self.messages)}", field="messages")

    @property
    def choices(self) -> list[str]:
        """What can be done about the kind."""
        repairs = LABELED[self.kind].repairs if self.kind is not None else ()
        return [each.value for each in repairs if each is not Repair.ALERT]


@dataclass(frozen=True, slots=True)
class RepairPreview:
    """What a repair would do: how many findings it would try, and some of their messages.

    ``left_out`` are those of the selection that the policy only reports. ``choices`` are the repairs of the kind.
    ``workers`` are those that have the reconciliation: none, and the repair waits for one, as the ``note`` says.
    """

    described: str
    database: str
    number: int
    left_out: int
    sample: list[UUID]
    how: str
    choices: list[str]
    workers: list[str]
    note: str

    @property
    def refusal(self) -> str:
        """Why nothing can be repaired; empty if something can."""
        return "" if self.number else "there is nothing to repair"


# --- statements ------------------------------------------------------------------------------------------------------

# Those that no worker has begun with; the name of a group is the reconciliation's.
_OPEN_ORDERS = f"""
SELECT h.id, h.body, h.born_at
  FROM {{s}}.half_message h JOIN {{s}}.op_message o ON o.half_id = h.id AND o.resolution = 'commit'
 WHERE h.topic = '{TOPIC}' AND h.deliver_at IS NULL
   AND NOT EXISTS (SELECT FROM {{s}}.consumer_message m WHERE m.consumer_group = h.key AND m.message_id = h.id)
   AND NOT EXISTS (SELECT FROM {{s}}.reconciliation_run r WHERE r.job_id = h.id)
 ORDER BY h.born_at, h.id
"""

_FOUND = f"""
    SELECT id, message_id, kind, coalesce(action, 'alert') AS action
      FROM {{s}}.reconciliation_finding
     WHERE run_id = %(run)s AND message_id IS NOT NULL AND {SETTLED} IS NOT TRUE
       AND (%(kind)s::text IS NULL OR kind = %(kind)s)
       AND (%(ids)s::uuid[] IS NULL OR message_id = ANY (%(ids)s::uuid[]))"""
_TRIED = "(%(repair)s::text IS NOT NULL OR action <> 'alert')"

_PREVIEW = f"""
WITH found AS MATERIALIZED ({_FOUND})
SELECT count(*) FILTER (WHERE {_TRIED}), count(*) FILTER (WHERE NOT {_TRIED}),
       (array_agg(message_id ORDER BY id DESC) FILTER (WHERE {_TRIED}))[1:{_SAMPLE}]
  FROM found
"""

_START = f"""
WITH found AS MATERIALIZED (SELECT * FROM ({_FOUND}) f WHERE {_TRIED}
), bulk_job AS (
    INSERT INTO {{s}}.bulk_job (id, action, requested_by, reason, options, selector, rate, total, idempotency_key,
                                 origin)
    SELECT %(id)s, '{REPAIR.name}', %(actor)s, %(reason)s, %(options)s::jsonb, %(selector)s::jsonb, %(rate)s,
           (SELECT count(*) FROM found), %(key)s, %(origin)s::jsonb
    ON CONFLICT (idempotency_key) DO NOTHING
    RETURNING id
), item AS (
    INSERT INTO {{s}}.bulk_item (bulk_job_id, number, action, message_id, topic, consumer_group)
    SELECT o.id, row_number() OVER (ORDER BY f.id), '{REPAIR.name}', f.message_id, %(topic)s, %(group)s
      FROM found f, bulk_job o
    RETURNING 1
)
SELECT (SELECT count(*) FROM found), (SELECT count(*) FROM item)
"""

_EARLIER = """
SELECT id, requested_by, rate, (selector - 'described' - 'counts')::text
  FROM {s}.bulk_job WHERE idempotency_key = %(key)s
"""

# --- ordering --------------------------------------------------------------------------------------------------------


class ReconciliationOrders(Reconciliations):
    """What an operator sees of reconciliations, and orders; each order is recorded in ``audit``.

    Raises (all of its methods): as `Reconciliations`; and InvalidRequest for an actor or a reason that can't be stored.
    """

    def orders(self) -> list[RunOrder]:
        """Return the runs that are ordered, and that no worker has begun yet, the oldest first."""
        found: list[RunOrder] = []
        for database in self.databases.having("consumer"):
            if "producer" in database.parts:
                with database.read_only() as connection:
                    found += _open_orders(connection, database)
        return self.shown_texts(found)

    def run_now(
        self, schedule: str, *, by: str | Actor, why: str = "", dry_run: bool = False, database: str | None = None,
        topic: str | None = None, group: str | None = None,
    ) -> RunOrder:  # fmt: skip
        """Order that a worker runs a reconciliation that it has declared; ``dry_run`` compares, and repairs nothing.

        ``topic`` and ``group`` choose among several of this name by the first pair that they compare.

        Raises:
            ActRefused: no living worker has it, it is ordered already, or it follows the log without an end.
            InvalidRequest: there are several of this name.
        """
        actor = checked_actor(RECONCILE, by, why)
        chosen = self._declared(schedule, database, topic, group)
        if chosen.follows is not None:
            raise ActRefused(f"reconciliation {schedule!r} follows the log without an end: there is no run to order")
        home, order_id = self.databases[chosen.database], uuid7()
        if "producer" not in home.parts:
            raise ActRefused(
                f"database {home.name!r} has only the consumer's tables, and a run is ordered by a message of topic "
                f"{TOPIC}: make the producer's tables there too, by outbox db upgrade"
            )
        request = RunRequest(schedule, *chosen.pairs[0], actor.name, why.strip(), dry_run)
        recorded = {"order": str(order_id), "dry_run": dry_run}
        with home.acting() as connection:
            execute(connection, take_lock(lock_key("reconcile", home.schema, schedule)))
            waiting = [each for each in _open_orders(connection, home) if each.schedule == schedule]
            if any((each.topic, each.group) == request.pair for each in waiting):
                raise ActRefused(f"reconciliation {schedule!r} is ordered already, and waits for a worker")
            execute(connection, request.send(home.schema, order_id))
            execute(connection, record_of(home.schema, RECONCILE.name, actor, why, schedule, recorded))
            (order,) = (each for each in _open_orders(connection, home) if each.id == order_id)
        return order

    def preview_repair(
        self, run_id: UUID, kind: str | None = None, messages: tuple[UUID, ...] | None = None, repair: str | None = None
    ) -> RepairPreview:
        """Return what a repair of findings would do (see `RepairSelection`); writes nothing.

        Raises:
            NotFound: no registered database has the run.
        """
        selection = RepairSelection(run_id, kind, messages, repair)
        database, found = self._find(run_id)
        with database.read_only() as connection:
            ((number, left_out, sample),) = query(connection, database.schema, _PREVIEW, **_values(selection))
        workers = [] if database.name in self.databases.away else self._workers(database, found)
        what = described(found, selection, number)
        how = "" if repair is None else f"{repair} {Repair(repair).does}"
        note = "" if workers else f"{_WAITS}; it is carried out as soon as there is one"
        return RepairPreview(what, database.name, number, left_out, sample or [], how, selection.choices, workers, note)

    def repair(
        self, run_id: UUID, *, by: str | Actor, why: str, kind: str | None = None,
        messages: tuple[UUID, ...] | None = None, repair: str | None = None, number: int | None = None,
        rate: float | None = None, idempotency_key: str | None = None,
    ) -> BulkJob:  # fmt: skip
        """Order a bulk job that repairs what a run has found, and is neither repaired nor healed; return it.

        A worker that has the reconciliation looks at each message again: it leaves what has healed, and what is of
        another kind now. For the selection see `RepairSelection`. ``number`` is that of the preview, ``rate``
        is messages a second at most. The same ``idempotency_key`` returns the bulk job that was ordered with it before.

        Raises:
            ActRefused: the run hasn't ended, or has compared tables that aren't ours, or there is nothing to repair.
            SelectorChanged: there are more or fewer than ``number``, or the key was used for something else.
            BulkJobTooLarge: more than 100,000 findings.
            NotFound: no registered database has the run.
        """
        actor = checked_actor(REPAIR, by, why)
        check_order(rate, idempotency_key)
        selection = RepairSelection(run_id, kind, messages, repair)
        database, found = self._find(run_id)
        # What follows the log has found it already, though it goes on.
        if found.finished_at is None and not (found.plan or {}).get("follows"):
            raise ActRefused(f"run {run_id} hasn't ended: what it finds can be repaired then")
        if foreign := (found.plan or {}).get("foreign"):
            raise ActRefused(
                f"run {run_id} has compared tables of the {' and '.join(foreign)} that aren't the outbox's: no worker "
                "can repair what it found; its report says what to do by hand"
            )
        job_id, options = uuid7(), {"run": str(run_id), **({"repair": selection.repair} if selection.repair else {})}
        selector: dict[str, Any] = {"run": str(run_id), "kind": selection.kind, "repair": selection.repair}
        selector |= {"messages": None if selection.messages is None else sorted(map(str, selection.messages))}
        values = _values(selection) | {"id": job_id, "actor": actor.name, "reason": why.strip(), "topic": found.topic}
        values |= {"group": found.group, "options": _json(options), "selector": _json(selector), "key": idempotency_key}
        values |= {"rate": rate}
        with database.acting() as connection:
            if earlier := _earlier(connection, database, idempotency_key, (actor.name, rate, selector)):
                job_id = earlier
            else:
                self._start(connection, database, found, selection, values | {"origin": _json(actor.origin)}, number)
                recorded = {"did": "start", "action": REPAIR.name, "run": str(run_id)}
                execute(connection, record_of(database.schema, "bulk", actor, why, job_id, recorded))
        return BulkJobs(self.databases).bulk_job(job_id)

    def _start(
        self, connection: Connection, database: Database, run: Run, selection: RepairSelection,
        values: Mapping[str, Any], number: int | None,
    ) -> None:  # fmt: skip
        _, ((found, written),) = execute(connection, plan_by_index(), statement(database.schema, _START, values))
        if not found:
            raise ActRefused(f"there is nothing to repair: no finding of run {run.id} is left that this can be done to")
        if found > MAX_ITEMS:
            raise BulkJobTooLarge(f"{found} findings are left; repair at most {MAX_ITEMS} at once, such as one kind")
        if written < found or number not in {None, found}:
            raise SelectorChanged(f"the findings have changed since the preview, now {found}; look at it again")
        says = "UPDATE {s}.bulk_job SET selector = selector || %(says)s::jsonb WHERE id = %(id)s"
        described_as = {"says": _json({"described": described(run, selection, found)}), "id": values["id"]}
        execute(connection, statement(database.schema, says, described_as))

    def _declared(self, name: str, database: str | None, topic: str | None, group: str | None) -> Schedule:
        known = [each for each in self.schedules() if each.pairs and each.database == (database or each.database)]
        found = [each for each in known if each.name == name]
        if topic is not None and group is not None:
            found = [each for each in found if each.pairs[0] == (topic, group)]
        if not found:
            there = ", ".join(sorted({each.name for each in known})) or "none"
            raise ActRefused(
                f"no living worker with the role reconcile has a reconciliation {name!r} here; there is {there}. Start "
                "one: outbox run --app MODULE:OBJECT --roles reconcile"
            )
        if len(found) > 1:
            of = "; ".join(f"database {each.database}, {each.pairs[0][0]} and {each.pairs[0][1]}" for each in found)
            raise InvalidRequest(
                f"several are called {name!r}: name the database, topic and group of one: {of}", "topic"
            )
        return found[0]

    def _workers(self, database: Database, run: Run) -> list[str]:
        with database.read_only() as connection:
            having = self._schedules_in(connection, database)
        return sorted({worker for each in having if (run.topic, run.group) in each.pairs for worker in each.workers})


def _open_orders(connection: Connection, database: Database) -> list[RunOrder]:
    found = []
    for order_id, body, born_at in query(connection, database.schema, _OPEN_ORDERS):
        request = RunRequest.of(json.loads(bytes(body)))
        named = request.schedule, *request.pair, request.dry_run, request.by or "", request.why
        found.append(RunOrder(database.name, order_id, *named, born_at))
    return found


def described(run: Run, selection: RepairSelection, number: int) -> str:
    """Return what a repair does to how many messages of which topic and group."""
    kind = "" if selection.kind is None else f"{selection.kind.replace('_', ' ')} "
    how = selection.repair or "by the policy of the run"
    return f"repair {counted(number, f'{kind}message')} of group {run.group}, topic {run.topic} ({how})"


def _values(selection: RepairSelection) -> dict[str, Any]:
    ids = None if selection.messages is None else list(selection.messages)
    return {"run": selection.run, "kind": selection.kind, "ids": ids, "repair": selection.repair}


def _json(value: Mapping[str, Any]) -> str | None:
    return json.dumps(dict(value)) if value else None


def _earlier(
    connection: Connection, database: Database, key: str | None, order: tuple[str, float | None, dict[str, Any]]
) -> UUID | None:
    """Return the bulk job that was ordered with this key, if there is one; ``order`` has actor, rate and selector."""
    for job_id, requested_by, rate, before in query(connection, database.schema, _EARLIER, key=key) if key else ():
        if (requested_by, rate, json.loads(before)) != order:
            raise SelectorChanged(
                f"the idempotency key was used for something else (bulk job {job_id}); use another key"
            )
        return UUID(str(job_id))
    return None
