"""One message with its whole way over several databases: what is shown, what comes next, what can be done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from outbox import Settings
from outbox.acts.changes import Actor
from outbox.acts.messages import ACTS
from outbox.embedded import ServerLike
from outbox.errors import NotFound
from outbox.message.model import uuid7
from outbox.operator.databases import Database, Databases
from outbox.operator.look.message import _at as at
from outbox.operator.look.message import gather
from outbox.operator.model import MessageView
from outbox.operator.operator import Operator
from outbox.text import MASK
from tests.operator.looking import born, half, id_of, insert, open_databases, put, registered, row

ANN = Actor("ann", {"via": "console", "ip": "192.0.2.7"})
BODY = {"to": "acc-7", "cardNumber": "4111", "amount": 12.30}
STATES = ("undecided", "fenced", "parked_half", "rolled_back", "committed", "scheduled", "recalled", "dispatched",
          "compensated", "compensating", "consumed", "failed", "parked", "discarded", "quarantined")  # fmt: skip


INBOXES = {"consumed": "consumed", "failed": "failed", "parked": "parked", "discarded": "parked",
           "quarantined": "quarantined"}  # fmt: skip
HALVES = {"fenced": "undecided", "parked_half": "undecided", "compensated": "dispatched",
          "compensating": "dispatched"} | dict.fromkeys(INBOXES, "dispatched")  # fmt: skip
CHANGES_OF_HALVES = {
    "fenced": ["UPDATE outbox.half_check SET fenced = true WHERE half_id = :id"],
    "parked_half": [
        "UPDATE outbox.half_check SET parked_at = now(), reason = 'over its checks' WHERE half_id = :id",
        "INSERT INTO outbox.check_history (half_id, asked, worker, answer, error) "
        "VALUES (:id, 'checker', 'w1', 'unknown', 'no till')",
    ],
    "compensated": [
        "INSERT INTO outbox.compensation (half_id, function, requested_by, reason, result) "
        """VALUES (:id, 'app.undo', 'bob', 'no account', '{"iban": "DE1", "n": 1}')"""
    ],
    "compensating": [
        "INSERT INTO outbox.bulk_job (id, action, requested_by, reason, selector, total) "
        "VALUES (:id, 'compensate', 'bob', 'r', '{}', 1)",
        "INSERT INTO outbox.bulk_item (bulk_job_id, number, action, message_id) VALUES (:id, 1, 'compensate', :id)",
    ],
}


@dataclass
class World:
    engines: dict[str, Engine]
    databases: Databases
    ids: dict[str, UUID]
    count: int = 0

    def view(self, state: str | UUID) -> MessageView:
        """Return a message, or the usual one of a state, as it is shown."""
        return Operator(self.databases).message(state if isinstance(state, UUID) else self.ids[state])

    def run(self, name: str, sql: str, **values: Any) -> None:
        """Change a database."""
        with self.engines[name].begin() as connection:
            connection.execute(text(sql), values)

    def bring(self, state: str, topic: str = "orders") -> UUID:
        """Bring another message into a state; group ``till`` of the consumer's database handles them."""
        number = self.count
        self.count += 1
        status = HALVES.get(state, state)
        later = born(90_000) if status in {"scheduled", "recalled"} else None
        headers = {"trace": "1", "cookie": "c"}
        put(self.engines["sales"], status, [
            half(number, topic=topic, body=json.dumps(BODY).encode(), headers=headers, deliver_at=later),
        ])  # fmt: skip
        for sql in CHANGES_OF_HALVES.get(state, []):
            self.run("sales", sql, id=id_of(number))
        if state in INBOXES:
            discarded = born(500) if state == "discarded" else None
            insert(self.engines["cash"], "consumer_message", [
                row(number, INBOXES[state], topic=topic, attempts=4, changed_at=born(400), discarded_at=discarded),
            ])  # fmt: skip
        return id_of(number)


@pytest.fixture(scope="module")
def world(server: ServerLike, template: str) -> Iterator[World]:
    """A producer's database and a consumer's, with a message in each state; tests add messages of their own."""
    with open_databases(server, template, "sales", "cash") as engines:
        made = World(engines, registered(engines), {})
        made.ids |= {state: made.bring(state) for state in STATES}
        insert(engines["cash"], "consumer_offset", [
            {"consumer_group": "till", "topic": "orders", "queue": 0, "position": 10**9, "starts": 0},
        ])  # fmt: skip
        yield made


@pytest.mark.parametrize(
    ("state", "status", "told"),
    [
        ("undecided", "undecided", f"undecided: check 1 of 15 at {at(born(0))}"),
        ("fenced", "undecided", f"undecided: the fence of its transaction is tried at {at(born(1))}"),
        ("parked_half", "undecided", "waits for an operator: its half is parked (over its checks)"),
        ("rolled_back", "rolled_back", "rolled back by the producer on "),
        ("committed", "committed", "committed: a worker dispatches it next"),
        ("scheduled", "scheduled", f"scheduled for {at(born(90_000))}"),
        ("recalled", "recalled", "recalled by ann: it is not sent"),
        ("compensated", "dispatched", "compensated on "),
        ("compensating", "dispatched", "its local transaction is being compensated"),
        ("dispatched", "dispatched", "left out by group till"),
        ("consumed", "dispatched", "consumed by group till"),
        ("failed", "dispatched", f"retry 4 of 16 by till at {at(born(90_000))}"),
        ("parked", "dispatched", "waits for an operator: parked by group till"),
        ("discarded", "dispatched", "discarded in group till"),
        ("quarantined", "dispatched", "quarantined in group till"),
    ],
)
def test_what_comes_next(world: World, state: str, status: str, told: str) -> None:
    """Status and a sentence on what happens next, for each state."""
    view = world.view(state)
    assert (view.id, view.database, view.status, view.unseen) == (world.ids[state], "sales", status, [])
    assert view.next.startswith(told)
    assert bool(told.endswith("on ")) or view.next == told


@pytest.mark.parametrize(
    ("state", "able"),
    [
        ("undecided", "check reset commit rollback"), ("fenced", "check reset rollback"),
        ("parked_half", "check reset commit rollback"), ("rolled_back", ""), ("committed", "compensate"),
        ("scheduled", "recall compensate"), ("recalled", "compensate"), ("dispatched", "resend compensate"),
        ("compensated", ""), ("compensating", ""), ("consumed", "resend compensate"),
        ("failed", "resend compensate retry park"),
        ("parked", "resend compensate retry discard"), ("discarded", "resend compensate restore"),
        ("quarantined", "resend compensate"),
    ],
)  # fmt: skip
def test_what_can_be_done(world: World, state: str, able: str) -> None:
    """What can be done is told with the groups, what can't with the reason; nothing is left out."""
    view = world.view(state)
    assert view.actions == {
        action: ["till"] if ACTS[action].part == "consumer" else [] for action in able.split()
    }  # fmt: skip
    assert set(view.actions) | set(view.refused) == set(ACTS)
    assert all(view.refused.values())


def test_the_whole_way(world: World) -> None:
    """Half, op, sends, inbox rows and their database are all there; the body is masked, the error whole."""
    view = world.view("parked")
    assert view.half
    assert (view.half["key"], view.half["headers"]) == ("key-12", {"trace": "1", "cookie": MASK})
    assert view.op
    assert (view.op["resolution"], view.op["decided_by"]) == ("commit", "producer")
    assert [send["send_number"] for send in view.sends] == [1]
    (inbox,) = view.inbox
    assert (inbox.database, inbox.group, inbox.attempts) == ("cash", "till", 4)
    assert (inbox.last_error or "").endswith("Traceback")
    assert view.body
    assert json.loads(view.body.text or "") == BODY | {"cardNumber": MASK}
    assert view.body.masked == ("cardNumber",)
    compensation = world.view("compensated").compensation
    assert compensation
    assert compensation["result"] == {"iban": MASK, "n": 1}


def test_what_a_function_raised(world: World) -> None:
    """It is shown with its kind, and has its place in the timeline; whoever has read the message without it is late."""
    half_id = world.bring("undecided")
    version = world.view(half_id).version
    raised = {"error_kind": "Declined in bank.py:debit", "error": "bank.Declined: no money\n\nTraceback"}
    sql = "INSERT INTO outbox.half_error (half_id, error_kind, error) VALUES (:id, :error_kind, :error)"
    world.run("sales", sql, id=half_id, **raised)
    view = world.view(half_id)
    assert view.raised is not None
    assert {name: view.raised[name] for name in raised} == raised
    (event,) = (event for event in view.timeline if event.kind == "raised")
    assert (event.title, event.detail) == ("Its function raised Declined in bank.py:debit", "bank.Declined: no money")
    assert event.at == view.raised["raised_at"]
    assert view.version != version


def test_the_timeline(world: World) -> None:
    """Each step on record of all databases, in the order of time."""
    half_id = world.bring("parked")
    world.run("sales", "UPDATE outbox.op_message SET decided_at = :at WHERE half_id = :id", at=born(100), id=half_id)
    world.run("sales", "UPDATE outbox.message SET visible_at = :at WHERE half_id = :id", at=born(200), id=half_id)
    world.run(
        "cash", "UPDATE outbox.consumer_message SET received_at = :at WHERE message_id = :id", at=born(300), id=half_id
    )
    act = {"acted_at": born(450), "actor": "ann", "action": "park", "target": f"till/{half_id}", "reason": "enough"}
    insert(world.engines["cash"], "audit", [act])
    insert(world.engines["sales"], "audit", [act | {"acted_at": born(460), "action": "resend", "target": str(half_id)}])
    view = world.view(half_id)
    assert [(event.kind, event.title, event.database) for event in view.timeline] == [
        ("written", "Half message written", "sales"),
        ("committed", "Committed by the producer", "sales"),
        ("dispatched", "Dispatched", "sales"),
        ("received", "First handled by group till", "cash"),
        ("parked", "Parked by group till (4 attempts)", "cash"),
        ("act", "park in group till", "cash"),
        ("act", "resend", "sales"),
    ]
    assert [event.at for event in view.timeline[1:]] == [born(number) for number in (100, 200, 300, 400, 450, 460)]
    assert [act.action for act in view.audit] == ["park", "resend"]
    assert (view.timeline[4].detail, view.timeline[5].actor) == ("ValueError: account 7 is closed", "ann")


def test_checks_in_the_timeline(world: World) -> None:
    """The checks of a half are steps on its way."""
    view = world.view("parked_half")
    assert ("Asked the checker: unknown", "no till", "w1") in [(e.title, e.detail, e.actor) for e in view.timeline]
    assert "half_parked" in [event.kind for event in view.timeline]
    assert len(view.history) == 1


def test_groups_without_a_row(world: World) -> None:
    """A group that hasn't come so far will get it; one that has come further has left it out; others aren't meant."""
    place = {"topic": "tickets", "queue": 0, "starts": 0}
    insert(world.engines["cash"], "consumer_offset", [
        place | {"consumer_group": "behind", "position": 0}, place | {"consumer_group": "ahead", "position": 10**9},
        place | {"consumer_group": "other", "position": 0, "topic": "payments"},
    ])  # fmt: skip
    view = world.view(world.bring("parked", topic="tickets"))
    assert [(each.group, each.status) for each in view.inbox] == [
        ("ahead", "left_out"), ("behind", "unconsumed"), ("till", "parked"),
    ]  # fmt: skip
    assert view.next == (
        "waits for an operator: parked by group till; comes next to group behind; left out by group ahead"
    )  # fmt: skip
    assert "behind: this group's inbox has no row of it" in view.refused["restore"]


def test_what_workers_tell(world: World) -> None:
    """How often is retried, and whether somebody could compensate, is known from the workers that live."""
    worker = {"id": uuid7(), "name": "w", "version": "1", "roles": [], "duties": {}}
    consumer = {"kind": "consumer", "topic": "orders", "group": "till", "name": "f", "options": {"retries": 5}}
    undo: dict[str, Any] = {"kind": "compensation", "topic": "orders", "group": None, "name": "g", "options": {}}
    try:
        insert(world.engines["cash"], "worker", [worker | {"handlers": [consumer]}])
        assert world.view("failed").next.startswith("retry 4 of 5 by till")
        assert "compensate" in world.view("failed").actions
        insert(world.engines["sales"], "worker", [worker | {"handlers": [undo | {"topic": "payments"}]}])
        assert "no worker that runs has a compensation for topic orders" in world.view("failed").refused["compensate"]
        insert(world.engines["sales"], "worker", [worker | {"handlers": [undo], "id": uuid7()}])
        assert "compensate" in world.view("failed").actions
        world.run("sales", "UPDATE outbox.worker SET seen_at = now() - interval '1 hour'")
        assert "compensate" in world.view("failed").actions
    finally:
        for name in world.engines:
            world.run(name, "TRUNCATE outbox.worker")


def test_bulk_jobs_and_findings(world: World) -> None:
    """Bulk jobs which had the message, and what reconciliations found about it, of all databases."""
    (bulk_job,) = world.view("compensating").bulk_jobs
    assert (bulk_job.database, bulk_job.action, bulk_job.pending, bulk_job.total) == ("sales", "compensate", 1, 1)
    half_id = world.bring("parked")
    assert world.view(half_id).bulk_jobs == []
    run = {"id": uuid7(), "topic": "orders", "consumer_group": "till", "job_id": uuid7(), "started_at": born(600)}
    insert(world.engines["cash"], "reconciliation_run", [run])
    insert(world.engines["cash"], "reconciliation_finding", [
        {"run_id": run["id"], "message_id": half_id, "kind": "parked", "detail": {"a": 1}, "result": "done: so"},
        {"run_id": uuid7(), "message_id": half_id, "kind": "unconsumed", "detail": None, "result": None},
    ])  # fmt: skip
    lost, found = world.view(half_id).findings
    assert (found["database"], found["kind"], found["group"], found["detail"]) == ("cash", "parked", "till", {"a": 1})
    assert (lost["kind"], lost["group"]) == ("unconsumed", None)
    assert [e.title for e in world.view(half_id).timeline if e.kind == "found"] == [
        "Reconciliation found it parked for group till"
    ]  # fmt: skip


CHANGES = {
    "sales": (
        "INSERT INTO outbox.message (topic, queue, position, half_id, send_number) "
        "VALUES ('orders', 1, :place, :id, 2)",
        "INSERT INTO outbox.compensation (half_id, function, requested_by, reason) VALUES (:id, 'f', 'bob', 'r')",
    ),
    "cash": (
        "UPDATE outbox.consumer_message SET attempts = 5 WHERE message_id = :id",
        "UPDATE outbox.consumer_message SET discarded_at = now() WHERE message_id = :id",
        "UPDATE outbox.consumer_message SET status = 'failed', next_attempt_at = now() WHERE message_id = :id "
        "AND discarded_at IS NULL",
        "UPDATE outbox.consumer_message SET changed_at = now() WHERE message_id = :id",
        "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts) "
        "VALUES ('new', :id, 'orders', 0, 1, 'consumed', 1)",
    ),
}


@pytest.mark.parametrize("sql", [sql for each in CHANGES.values() for sql in each])
def test_the_version_changes(world: World, sql: str) -> None:
    """Whatever changes about a message changes its version; a look at it doesn't, not even a reveal."""
    half_id = world.bring("parked")
    before = world.view(half_id).version
    Operator(world.databases).message(half_id, reveal=ANN)
    assert world.view(half_id).version == gather(world.databases, half_id).version == before
    world.run("sales" if sql in CHANGES["sales"] else "cash", sql, id=half_id, place=world.count)
    assert world.view(half_id).version != before


def test_the_version_of_an_undecided_half(world: World) -> None:
    """A check and a decision change the version; that time passes doesn't."""
    half_id = world.bring("undecided")
    before = world.view(half_id).version
    assert world.view(half_id).version == before
    world.run("sales", "UPDATE outbox.half_check SET check_times = 1 WHERE half_id = :id", id=half_id)
    between = world.view(half_id).version
    assert between != before
    commit = "INSERT INTO outbox.op_message (half_id, resolution, decided_by) VALUES (:id, 'commit', 'operator')"
    world.run("sales", commit, id=half_id)
    assert world.view(half_id).version not in {before, between}


def test_a_reveal_is_audited(world: World) -> None:
    """Who has the body revealed stands in the audit of the message's database, and by which way."""
    half_id = world.bring("parked")
    assert world.view(half_id).audit == []
    view = Operator(world.databases).message(half_id, reveal=ANN)
    assert view.body
    assert view.body.revealed
    assert json.loads(view.body.text or "") == BODY
    assert view.half
    assert view.half["headers"]["cookie"] == "c"
    (act,) = world.view(half_id).audit
    assert (act.database, act.actor, act.action, act.origin) == ("sales", "ann", "reveal", dict(ANN.origin))
    assert world.view(half_id).body != view.body


def test_no_reveal_without_audit(world: World) -> None:
    """If it can't be recorded, nothing is revealed."""
    world.run("sales", "ALTER TABLE outbox.audit ADD CONSTRAINT no CHECK (action <> 'reveal') NOT VALID")
    try:
        with pytest.raises(DBAPIError):
            Operator(world.databases).message(world.ids["parked"], reveal=ANN)
    finally:
        world.run("sales", "ALTER TABLE outbox.audit DROP CONSTRAINT no")


def test_raw_bodies(world: World) -> None:
    """The bytes of a message are given as they are."""
    assert Operator(world.databases).body(world.ids["parked"]) == ("application/json", json.dumps(BODY).encode())
    with pytest.raises(NotFound):
        Operator(world.databases).body(uuid7())


def test_a_message_that_nobody_knows(world: World) -> None:
    """An id without a trace is an error that names the databases."""
    with pytest.raises(NotFound, match="sales, cash"):
        Operator(world.databases).message(uuid7())


def down(server: ServerLike, part: str) -> Database:
    """Return a database that can't be reached."""
    return Database("down", create_engine(server.url("is_not_there")), Settings(), frozenset({part}))


@pytest.mark.parametrize("part", ["producer", "consumer"])
def test_a_database_that_is_down(world: World, server: ServerLike, part: str) -> None:
    """What the others know is shown, and who could not be asked is named; a reveal still works."""
    databases = Databases([down(server, part), *world.databases.values()])
    view = Operator(databases).message(world.ids["parked"])
    assert view.unseen == ["down"]
    assert view.next == "waits for an operator: parked by group till"
    with pytest.raises(DBAPIError):
        Operator(databases).message(uuid7())


def test_only_an_inbox_knows_it(world: World, server: ServerLike) -> None:
    """Without its producer's database, a message is what its inbox says."""
    cash = world.databases["cash"]
    view = Operator(Databases([cash])).message(world.ids["parked"], reveal=ANN)
    assert (view.database, view.status, view.half, view.body, view.op) == (None, None, None, None, None)
    assert view.next == "waits for an operator: parked by group till"
    assert view.actions == {"retry": ["till"], "discard": ["till"]}
    assert "no half message has this id" in view.refused["resend"]
    unseen = Operator(Databases([cash, down(server, "producer")])).message(world.ids["parked"])
    assert unseen.refused["resend"] == "its state isn't known: down can't be read now"


def test_hostile_texts(world: World) -> None:
    """What stands in messages and errors comes as it is, and means nothing."""
    hostile = "'; DROP TABLE x; -- %s {s} <script>\\"
    put(
        world.engines["sales"],
        "dispatched",
        [half(9000, key=hostile, tag=hostile, headers={hostile: hostile}, topic="orders")],
    )
    insert(
        world.engines["cash"],
        "consumer_message",
        [row(9000, "parked", group="g", last_error=hostile, error_kind=hostile)],
    )
    view = Operator(world.databases).message(id_of(9000))
    assert view.half
    assert (view.half["key"], view.half["headers"]) == (hostile, {hostile: hostile})
    assert view.inbox[0].last_error == hostile
