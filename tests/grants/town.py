"""A producer's and a consumer's database, and each duty carried out there by roles that have just their GRANTs."""

from __future__ import annotations

import datetime as dt
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Breaker, Message, Outbox, Outgoing, Resolution, Settings
from outbox.acts.changes import Actor, Target
from outbox.check.asker import Asker
from outbox.check.check_pass import check_once
from outbox.compensate.compensate_pass import compensate_once
from outbox.compensate.quarantine import quarantine_group
from outbox.consumer.consumer import Consumer
from outbox.consumer.outside.consumer import consumer_of
from outbox.database import execute as execute_module
from outbox.database.duty import PARTS, Part
from outbox.database.engines import EngineRunner
from outbox.delivery.confirm_pass import confirm_once
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.errors import AlreadyCommitted
from outbox.flow import sql as flow_sql
from outbox.flow.views import FlowFilter, Sagas
from outbox.message.model import uuid7
from outbox.operator import model
from outbox.operator.bulk.run import bulk_once
from outbox.operator.databases import Databases
from outbox.operator.health.grants import statements
from outbox.operator.health.stats import as_sample, stats
from outbox.operator.model import Selector
from outbox.operator.operator import Operator
from outbox.producer import sql as producer_sql
from outbox.prune.prune_pass import prune_consumer_once, prune_producer_once, prune_records_once
from outbox.reconcile.duty.reconciliation import JobReconciler, begun, lose, reconcilers
from outbox.reconcile.duty.repairs import Repairs
from outbox.reconcile.job import Access, Job, Pair, Window
from outbox.reconcile.record.orders import ReconciliationOrders
from outbox.reconcile.record.timetable import RunRequest, last_scheduled
from outbox.reconcile.record.views import Reconciliations, RunFilter
from outbox.reconcile.record.write import RunIds
from outbox.reconcile.run import reconcile
from outbox.relay.intake.gaps import join_once
from outbox.relay.intake.source import Received
from outbox.relay.published import PublishedTable
from outbox.schedule.schedule_pass import Scheduler
from outbox.testing import make_due, schedules
from outbox.testing.runners import PassRunners
from outbox.worker.report import Facts, leave, report_once
from tests.kit import Tables, consume_all

PASSWORD = "hunter2"  # noqa: S105 - of roles that live as long as a test


class Town:
    """Both databases, seen by their owner (``owned``), and as a duty's role sees them (``at``)."""

    def __init__(self, producer: Engine, consumer: Engine, settings: Settings) -> None:
        self.settings = settings
        self.owned: dict[Part, Engine] = {"producer": producer, "consumer": consumer}
        self.at = dict(self.owned)
        self.producer, self.consumer = Tables(producer), Tables(consumer)
        self.app = Outbox(producer, settings=settings)
        self.app.declare_topic("t", 1)

    @contextmanager
    def acting_as(self, role: str, **grants: Any) -> Iterator[str]:
        """Have a new role of PostgreSQL with the GRANTs of a role of ours do all that follows; yield its name."""
        name = f"{role}_of_town"
        with ExitStack() as stack:
            for part in PARTS:
                admin = stack.enter_context(closing(self.admin(part)))
                if part == "producer":
                    admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'".encode())
                    stack.callback(admin.execute, f"DROP ROLE {name}".encode())
                stack.callback(admin.execute, f"DROP OWNED BY {name}".encode())
                for statement in statements(role, name, part, **grants):
                    admin.execute(statement.encode())
                url = self.owned[part].url.set(username=name, password=PASSWORD)
                self.at[part] = create_engine(url, poolclass=NullPool)
            yield name
        self.at = dict(self.owned)

    def admin(self, part: Part) -> psycopg.Connection[Any]:
        """Connect as the owner of the tables, by the driver alone."""
        url = self.owned[part].url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(url, autocommit=True)

    def send(self, body: Any = "b", **options: Any) -> UUID:
        """Send a message as the owner."""
        with self.owned["producer"].begin() as connection:
            return self.app.send(connection, options.pop("topic", "t"), body, **options)

    def dispatched(self, number: int = 1, **options: Any) -> list[UUID]:
        """Send messages and dispatch them, as the owner."""
        ids = [self.send(**options) for _ in range(number)]
        with self.owned["producer"].connect() as connection:
            while dispatch_once(connection, self.settings).taken:
                pass
        return ids

    def prepare(self, topic: str = "t") -> UUID:
        """Prepare a half as the owner; its check is due."""
        with self.owned["producer"].begin() as connection:
            return self.app.prepare(connection, topic, "b", immunity=0)

    def subscribed(self, handler: Callable[..., Any], group: str = "g", **options: Any) -> Consumer:
        """Return a consumer of topic `t`, whose group hasn't begun."""
        app = Outbox(self.at["consumer"], settings=self.settings)
        app.consumer("t", group=group, **options)(handler)
        return consumer_of(app.subscriptions["t", group], self.settings)

    @contextmanager
    def connections(self) -> Iterator[tuple[Connection, Connection]]:
        """Connect to the consumer's database and to the producer's, as the duty's role."""
        with self.at["consumer"].connect() as consumer, self.at["producer"].connect() as producer:
            yield consumer, producer

    def operator(self, *parts: Part) -> Operator:
        """Return an operator over the databases of these parts."""
        return Operator.open({part: self.at[part] for part in parts}, self.settings)

    def parked(self, number: int = 1) -> list[UUID]:
        """Have the group park messages, as the owner of the tables."""
        before, self.at = self.at, dict(self.owned)
        try:
            ids = self.dispatched(number)
            consumer = self.subscribed(fail, retry_delays=(), on_pruned="skip")
            with self.connections() as (own, source):
                consumer.start(own, source)
                consume_all(consumer, own, source)
        finally:
            self.at = before
        return ids


def fail(message: Message, session: Session) -> None:
    """Fail."""
    raise ValueError("no such account")


def succeed(message: Message, session: Session) -> None:
    """Do nothing, with success."""


# --- the duties ----------------------------------------------------------------------------------------------------


def send(town: Town) -> None:
    """Send one message in a transaction, several with a prepared half, one to a queue, and one once; and report."""
    app = Outbox(town.at["producer"], settings=town.settings)
    app._producer._report.due_at = 0.0
    with town.at["producer"].begin() as connection:
        app.send(connection, "t", "b")
    with town.at["producer"].begin() as connection:
        ids = [app.send(connection, "t", "b"), app.send(connection, "t", "b"), app.prepare(connection, "t", "b")]
    with town.at["producer"].begin() as connection:
        ids += [app.send(connection, "t", "b", queue=0), app.send(connection, "t", "b", dedupe="order-4711")]
    assert set(ids) <= set(town.producer.rows("SELECT id FROM outbox.half_message"))


def decide(town: Town) -> None:
    """Commit and roll back; learn that another decision came first; and store what a function raised."""
    app = Outbox(town.at["producer"], settings=town.settings)
    first, second = town.prepare(), town.prepare()
    decisions = app.commit(first), app.rollback(second), app.commit(first)
    assert [decision is not None and decision.first for decision in decisions] == [True, True, False]
    with pytest.raises(AlreadyCommitted):
        app.rollback(first)
    with town.at["producer"].begin() as connection:
        stored = producer_sql.store_error("outbox", half_id=second, kind="KeyError", error="KeyError: 7")
        execute_module.execute(connection, stored)


def saga(town: Town) -> None:
    """Start a saga, send a command, read and change both; and have a branch tried, confirmed and cancelled."""
    flow, command = uuid4(), uuid4()
    branch = {"transaction_id": uuid4(), "branch": "", "participant": "p"}
    with town.at["producer"].begin() as connection:
        execute_module.execute(
            connection,
            flow_sql.start("outbox", id=flow, name="s", content_type="text/plain", body=b""),
            flow_sql.send("outbox", message_id=command, saga_id=flow, number=1, step="a", kind="action"),
            flow_sql.lock("outbox", name="s", command=command),
            flow_sql.may_come("outbox", ids=[flow], name="s", start="s.start"),
            flow_sql.answer(
                "outbox", command=command, answer="done", reason=None, result_type="text/plain", result=b""
            ),
            flow_sql.change("outbox", id=flow, status="completed", reason=None, ended=True),
            flow_sql.try_branch("outbox", **branch),
            flow_sql.confirm_branch("outbox", **branch),
            flow_sql.cancel_branch("outbox", **branch),
            flow_sql.branch_state("outbox", **branch),
        )


def flow_control(town: Town) -> None:
    """Send while the limits are looked at, with messages that wait."""
    town.send()
    town.prepare()
    settings = replace(town.settings, max_undecided=1_000, max_undispatched=1)
    app = Outbox(town.at["producer"], settings=settings)
    with town.at["producer"].connect() as connection, connection.begin() as transaction:
        app.prepare(connection, "other", "b")
        transaction.rollback()
    with town.at["producer"].begin() as connection:
        for count in (producer_sql.undecided, producer_sql.undispatched):
            execute_module.execute(connection, count("outbox", least=1, limit=1, **producer_sql.SAMPLE))


def dispatch(town: Town) -> None:
    """Start over in this cluster, then dispatch: at once, for later, and what has lost its half."""
    lost = town.send()
    town.producer.run("DELETE FROM outbox.half_message WHERE id = :id", id=lost)
    town.send()
    town.send(delay=3600)
    town.producer.run("DELETE FROM outbox.dispatch_cursor")
    with town.at["producer"].connect() as connection:
        while dispatch_once(connection, town.settings).taken:
            pass
        town.send(topic="new")
        assert dispatch_once(connection, town.settings).done == 1
    Outbox(town.at["producer"], settings=town.settings).declare_topic("new", 16)


def release(town: Town) -> None:
    """Release what is due."""
    town.dispatched(delay=3600)
    make_due(town.app, failed=False, orphans=False)
    with town.at["producer"].connect() as connection:
        assert release_due_once(connection, town.settings).done >= 1
    town.dispatched(delay=3600)
    make_due(town.app, failed=False, orphans=False)
    owner = Operator.open({"producer": town.owned["producer"]}, town.settings)
    owner.pause_topic("t", by="ada", why="why", create=True)
    with town.at["producer"].connect() as connection:
        assert not release_due_once(connection, town.settings)
        owner.resume_topic("t", by="ada")
        assert release_due_once(connection, town.settings).done == 1
    assert owner.topic_pauses() == []


def schedule(town: Town) -> None:
    """Declare a schedule, send the message of a time and of an order, and leave out what was missed."""
    app = Outbox(town.at["producer"], settings=town.settings)
    app.every(3600.0, topic="t", name="hourly", missed="skip")(lambda at: Outgoing("x", dedupe=str(at), queue=0))
    app.every("0 3 * * *", topic="t", name="daily", missed="skip")(lambda at: Outgoing("x", id=uuid4()))
    with ExitStack() as stack:
        runners = PassRunners("schedule")
        scheduler = Scheduler(town.settings, app.schedules, runners.new(app, "none"))
        stack.callback(scheduler.end)
        connection = stack.enter_context(town.at["producer"].connect())
        scheduler.order(connection)
        assert scheduler.once(connection, connection, lambda: False).done == 2
        town.producer.run("UPDATE outbox.cron_schedule SET last_at = last_at - interval '2 days'")
        assert scheduler.once(connection, connection, lambda: False).done == 0


class Given:
    """What an intake takes from: two messages, the second of which can't be one here."""

    name = "given"

    def take(self, *_: float) -> list[Received]:
        """Return them."""
        position = {"ce-outboxtopic": "t", "ce-outboxqueue": "0", "ce-sequence": "1"}
        return [Received("1", b"x", {"ce-id": str(uuid4()), **position}), Received("2", b"y", {"a" * 9000: "b" * 9000})]

    def confirm(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def intake(town: Town) -> None:
    """Take messages in, one as it is, and once more, which stores nothing."""
    app = Outbox(town.at["producer"], settings=town.settings)
    app.intake("t", source=Given())
    with town.at["producer"].connect() as connection:
        assert app.intakes[0].once(connection, "outbox").done == 2
        assert app.intakes[0].once(connection, "outbox").done == 2
        join_once(connection, town.settings)


def publish(town: Town) -> None:
    """Write messages of a relay into the table."""
    messages = [message_of(id_) for id_ in town.dispatched(2)]
    with town.at["producer"].begin() as connection:
        PublishedTable().rows(lambda: "outbox")(messages, connection)
    assert town.producer.value("SELECT count(*) FROM outbox.published") == 2


def message_of(half_id: UUID) -> Message:
    """Return a message as a relay has it."""
    now = dt.datetime.now(dt.UTC)
    return Message(half_id, "t", 0, 1, "k", None, "text/plain", b"x", now, now)


def check(town: Town) -> None:
    """Try a fence; ask a checker that knows, and one that doesn't, until the half is parked."""
    app = Outbox(town.at["producer"], settings=town.settings)
    dying(town)
    answers = itertools.cycle([Resolution.COMMIT, Resolution.UNKNOWN, Resolution.ROLLBACK])
    app.checker("known", max_checks=5)(lambda orphan: next(answers))
    app.checker("unknown", max_checks=1)(lambda orphan: Resolution.UNKNOWN)
    app.on_parked("unknown")(lambda letter, session: None)
    for topic in ("known", "known", "known", "unknown"):
        town.prepare(topic)
    for _ in range(3):
        town.producer.age_checks()
        asker = Asker(lambda is_async: EngineRunner(town.at["producer"]), 1)
        with town.at["producer"].connect() as connection:
            check_once(connection, town.settings, app.checkers, asker)
        asker.end()
    assert town.producer.rows("SELECT topic FROM outbox.half_check WHERE topic NOT IN ('t', 'stuck')") == ["unknown"]


def prune(town: Town) -> None:
    """Delete what is older than the retention."""
    first, _ = town.dispatched(2)
    town.producer.run("UPDATE outbox.op_message SET decided_at = decided_at - interval '9 days'")
    town.producer.run("UPDATE outbox.message SET visible_at = visible_at - interval '9 days'")
    with town.at["producer"].connect() as connection:
        assert prune_producer_once(connection, town.settings).done >= 1
    assert not town.producer.rows("SELECT FROM outbox.half_message WHERE id = :id", id=first)


def prune_records(part: Part) -> Callable[[Town], None]:
    """Return what deletes old records of a part."""

    def pass_of(town: Town) -> None:
        tables = Tables(town.owned[part])
        tables.run("INSERT INTO outbox.stats_sample VALUES ('2020-01-01', '{}')")
        with town.at[part].connect() as connection:
            assert prune_records_once(connection, town.settings).taken >= 1

    return pass_of


def compensate(town: Town) -> None:
    """Compensate a message that is parked in one group, and give up one that was consumed."""
    app = Outbox(town.at["producer"], settings=town.settings)
    app.compensation("t", consumers=[town.at["consumer"]])(lambda message, session: {"done": True})
    (parked,) = town.parked()
    (unread,) = town.dispatched()
    before, town.at = town.at, dict(town.owned)
    operator = town.operator("producer", "consumer")
    orders = [operator.compensate(each, by="ada", why="why").id for each in (parked, unread)]
    town.at = before
    with town.at["producer"].connect() as connection:
        compensate_once(
            connection,
            town.settings,
            compensations=app.compensations,
            new_runner=lambda is_async: EngineRunner(town.at["producer"]),
        )
    states = "SELECT state FROM outbox.bulk_item WHERE bulk_job_id = :id"
    assert [town.producer.value(states, id=order) for order in orders] == ["done", "done"]


def confirm(town: Town) -> None:
    """Learn what became of messages: one is parked and to be compensated, one is lost and sent again."""
    app = Outbox(town.at["producer"], settings=replace(town.settings, confirm_grace=0.0))
    app.known_group("t", group="g", consumer=town.at["consumer"])
    app.on_undeliverable("t")(lambda delivery, session: None)
    app.compensation("t", consumers=[town.at["consumer"]], when="parked")(lambda message, session: None)
    town.parked()
    (lost,) = town.parked()
    town.consumer.run("DELETE FROM outbox.consumer_message WHERE message_id = :id", id=lost)
    with town.at["producer"].connect() as connection:
        counts = confirm_once(
            connection,
            app.settings,
            groups=app.groups_to_confirm(),
            callbacks=app.delivery_callbacks,
            compensations=app.compensations,
        )
    assert town.producer.value("SELECT count(*) FROM outbox.bulk_job WHERE requested_by = 'policy'") == 1
    assert town.producer.value("SELECT count(*) FROM outbox.half_message WHERE topic = 'outbox.delivered'") >= 1
    assert min(counts.failed, counts.parked) >= 1


def dying(town: Town) -> UUID:
    """Have a fenced function die, as the owner; return its half, which nobody has checked."""

    @Outbox(town.owned["producer"], settings=town.settings).two_phase(topic="fenced", immunity=0)
    def dies(session: Session = INJECTED) -> str:
        raise KeyError("unknown to the rules")

    with pytest.raises(KeyError):
        dies()
    return UUID(str(town.producer.value("SELECT half_id FROM outbox.half_check WHERE fenced")))


def bulk(part: Part) -> Callable[[Town], None]:
    """Return what carries out each act that is done in a part."""

    def carry_out(town: Town) -> None:
        (parked,), (sent,) = town.parked(), town.dispatched()
        later = town.send(delay=3600)
        halves = [town.prepare() for _ in range(4)]
        town.dispatched()
        acts: dict[Part, list[tuple[str, Target]]] = {
            "producer": [
                ("resend", Target(sent)),
                ("recall", Target(later)),
                ("check", Target(dying(town))),
                *zip(("check", "reset", "commit", "rollback"), map(Target, halves), strict=True),
            ],
            "consumer": [(name, Target(parked, "g")) for name in ("discard", "restore", "retry", "park")],
        }
        operator = Operator.open({part: town.owned[part]}, town.settings)
        for name, target in acts[part]:
            job = operator.start(name, Selector(targets=(target,)), by="ada", why="why")
            with town.at[part].connect() as connection:
                assert bulk_once(connection, town.settings, bulk_job_id=job.id).done == 1

    return carry_out


def report(part: Part) -> Callable[[Town], None]:
    """Return what reports a worker, with a sample of the statistics."""

    def pass_of(town: Town) -> None:
        Tables(town.owned[part]).run("DELETE FROM outbox.stats_sample")
        facts = Facts(uuid7(), "w", "1", [], [], {})

        def sample(connection: Connection) -> Any:
            return as_sample(stats(connection, town.settings, [part], seconds=5.0))

        with town.at[part].connect() as connection:
            assert report_once(connection, town.settings, facts, sample).done == 1
            leave(connection, town.settings, facts.id)

    return pass_of


def consume(town: Town) -> None:
    """Begin a group; consume, fail, retry, step over what is compensated; follow a log that went back; read again."""
    _, again = town.parked(2)
    compensate_of_owner(town)
    Operator.open({"producer": town.owned["producer"]}, town.settings).resend([again], by="ada")
    town.dispatched()
    with town.connections() as (own, source):
        late = town.subscribed(succeed, "late", start="now")
        early = town.subscribed(succeed, "early")
        for consumer, group in ((late, "late"), (early, "early")):
            consumer.start(own, source)
            quarantine_group(own, source, "outbox", group, "t")
        failing = town.subscribed(fail)
        failing.start(own, source)
        consume_all(failing, own, source)
        town.consumer.age_retries()
        failing.retry_once(own, source)
        town.consumer.age_retries()
        consumer = town.subscribed(succeed, tags={"x"})
        consumer.start(own, source)
        consumer.retry_once(own, source)
        town.dispatched(2, tag="y")
        for handler in (fail, succeed):
            limited = town.subscribed(handler, "limited", tags={"y"}, rate="1000000/s", breaker=Breaker(failures=1))
            limited.start(own, source)
            consume_all(limited, own, source)
            town.consumer.run(
                "UPDATE outbox.group_control SET trial_at = clock_timestamp() WHERE opened_at IS NOT NULL"
            )
        take(town)
        town.dispatched(2, tag="x")
        consume_all(consumer, own, source)
        outside = town.subscribed(lambda _: None, "outside", transactional=False)
        outside.start(own, source)
        consume_all(outside, own, source)
    newest = town.producer.value("SELECT half_id FROM outbox.message ORDER BY position DESC LIMIT 1")
    town.producer.run("DELETE FROM outbox.message WHERE half_id = :id", id=newest)
    with town.connections() as (own, source):
        fresh = town.subscribed(succeed)
        fresh.start(own, source)
        consume_all(fresh, own, source)
    assert town.consumer.value("SELECT count(*) FROM outbox.log_loss") == 1
    read_again(town)


def take(town: Town) -> None:
    """Take messages, and settle each in another way; what is never settled is parked."""
    for key in ("a", "b", "c"):
        town.dispatched(tag="x", key=key)
    group = Outbox(town.at["consumer"], settings=town.settings).leased(
        "t", group="taken", source=town.at["producer"], ordered="key", retry_delays=()
    )
    done, failed, left, *_ = group.take(50, take_id="x")
    done.acknowledge()
    left.extend(0)
    failed.fail("ill", park=True)
    assert left.message.id not in {each.message.id for each in group.take(50)}


def read_again(town: Town) -> None:
    """Have an operator reset the group, and consume what it had."""
    operator = Operator.open({part: town.owned[part] for part in PARTS}, town.settings)
    operator.reset_group("g", "t", "first", by="ada", why="why", source="producer")
    with town.connections() as (own, source):
        consumer = town.subscribed(succeed)
        consumer.start(own, source)
        consume_all(consumer, own, source)
    assert town.consumer.value("SELECT count(*) FROM outbox.reread_message") >= 1


def compensate_of_owner(town: Town) -> None:
    """Have a message compensated by the owner of the tables."""
    before, town.at = town.at, dict(town.owned)
    try:
        compensate(town)
    finally:
        town.at = before


def prune_inbox(town: Town) -> None:
    """Delete what one group needs no more."""
    town.parked()
    with town.connections() as (own, source):
        town.consumer.run(
            "UPDATE outbox.consumer_message SET discarded_at = now() - interval '9 days',"
            " changed_at = now() - interval '9 days' WHERE status = 'parked'"
        )
        town.producer.run("DELETE FROM outbox.half_message")
        town.consumer.run("INSERT INTO outbox.rate_grant VALUES ('g', 't', now() - interval '1 h', 1)")
        assert prune_consumer_once(own, source, town.settings, "g", "t").done >= 1
        assert not town.consumer.rows("SELECT FROM outbox.rate_grant WHERE consumer_group = 'g'")


def compare(town: Town) -> None:
    """Reconcile, without a repair."""
    town.parked()
    producer, consumer = (
        Access(town.at[part].url.render_as_string(hide_password=False), town.settings) for part in PARTS
    )
    for _ in range(2):
        job = Job(producer, consumer, (Pair("t", "g"),), window=Window(grace=0.0))
        assert reconcile(job).pairs[0].counts
    _take_repairs(town, job)


def _take_repairs(town: Town, job: Job) -> None:
    """Take a repair that is ordered, which this role may order nothing for and repair nothing by."""
    app = Outbox(town.owned["consumer"], settings=town.settings)
    app.consumer("t", group="g", source=job.producer.url)(fail)
    app.reconciliation("all", every=3600)
    (reconciler,) = reconcilers(app, threading.Event())
    assert isinstance(reconciler, JobReconciler)
    owned = ReconciliationOrders(Databases.open({"consumer": town.owned["consumer"]}, town.settings))
    run = owned.runs(RunFilter(), model.PageRequest()).items[0].id
    ordered = [owned.repair(run, kind="parked", repair="retry", by="ada", why="why").id for _ in range(2)]
    Operator.open({"consumer": town.owned["consumer"]}, town.settings).cancel(ordered[1], by="ada")
    with town.at["consumer"].connect() as connection:
        Repairs([reconciler], "outbox")(connection, connection, lambda: False)


def ask_for_a_run(town: Town) -> None:
    """Send the message by which a reconciliation is run, once."""
    request, message_id = RunRequest("all", "t", "g"), uuid7()
    for _ in range(2):
        with town.at["producer"].begin() as connection:
            execute_module.execute(connection, request.send("outbox", message_id))
    assert town.producer.rows("SELECT count(*) FROM outbox.half_message WHERE topic = 'outbox.reconcile'") == [1]


def begin_a_run(town: Town) -> None:
    """Look when a reconciliation was run last, and begin a run anew whose worker was lost."""
    own = Access(town.at["consumer"].url.render_as_string(hide_password=False), town.settings)
    job, message_id = Job(own, own, (Pair("t", "g"),), window=Window(grace=0.0)), uuid7()
    with town.at["consumer"].begin() as connection:
        for _ in range(2):
            last_scheduled(connection, "outbox", "all", job.names)
            execute_module.execute(connection, begun("outbox", job=message_id), lose("outbox", job=message_id))
            execute_module.execute(connection, *RunIds.new(job, "all", message_id=message_id).begin(job))
    ended = f"SELECT error IS NOT NULL FROM outbox.reconciliation_run WHERE job_id = '{message_id}' ORDER BY 1"
    assert town.consumer.rows(ended) == [False, True]


def look(town: Town) -> None:
    """Read all that the console shows."""
    (parked,) = town.parked()
    town.consumer.run(
        "INSERT INTO outbox.reconciliation_run (id, job_id, topic, consumer_group)"
        " VALUES (gen_random_uuid(), gen_random_uuid(), 't', 'g')"
    )
    operator = town.operator(*PARTS)
    page = model.PageRequest()
    operator.messages(model.MessageFilter(), page)
    operator.messages(model.MessageFilter(status=tuple(model.MessageFate)), page)
    operator.halves(model.HalfFilter(), page)
    operator.scheduled(model.ScheduledFilter(), page)
    operator.audit(model.AuditFilter(), page)
    operator.inbox(model.InboxFilter(), page)
    operator.dead_groups()
    operator.bulk_jobs(model.BulkJobFilter(), page)
    operator.message(parked)
    operator.conversation(parked)
    operator.producers()
    operator.overview()
    operator.groups()
    operator.workers()
    operator.system()
    operator.locks()
    operator.handlers()
    operator.controls()
    operator.topic_pauses()
    operator.cron_schedules()
    sagas = Sagas(operator.databases)
    sagas.flow(_command(town)[0])
    sagas.flows(FlowFilter(), page)
    reconciliations = Reconciliations(operator.databases)
    reconciliations.schedules()
    for run in reconciliations.runs(RunFilter(), page).items:
        reconciliations.run(run.id)


def order(part: Part) -> Callable[[Town], None]:
    """Return what orders a bulk job, shows a body unmasked, writes notes, silences a rule, and answers a saga."""

    def act(town: Town) -> None:
        (parked,), (sent,) = town.parked(), town.dispatched()
        target = Target(sent) if part == "producer" else Target(parked, "g")
        name = "resend" if part == "producer" else "discard"
        operator = town.operator(part)
        job = operator.start(name, Selector(targets=(target,)), by="ada", why="why")
        operator.cancel(job.id, by="ada", why="why")
        operator.message(target.message_id, reveal=Actor("ada"))
        for group in operator.dead_groups(limit=1) if part == "consumer" else ():
            for note in ("first", "second", ""):
                operator.note(group.fingerprint, by="ada", note=note)
        operator.silence("group.lag", 60, by="ada", why="why")
        operator.lift_silence("group.lag", by="ada")
        operator.save_filter("late", "messages", "topic=orders", by="ada")
        operator.delete_filter("late", "messages", by="ada")
        if part == "consumer":
            operator.set_rate("g", "5/s", by="ada")
            operator.pause_group("g", by="ada", why="why")
            operator.resume_group("g", by="ada")
            operator.set_rate("g", None, by="ada")
        else:
            ask_for_a_run(town)
            Sagas(operator.databases).answer(_command(town)[1], "done", by="ada", why="why")
            for _ in range(2):
                operator.pause_topic("paused", by="ada", why="why", create=True)
                operator.resume_topic("paused", by="ada")
            declared(town)
            operator.pause_cron("hourly", by="ada", why="why")
            operator.resume_cron("hourly", by="ada")
            operator.run_cron("hourly", by="ada")

    return act


def groups(town: Town) -> None:
    """Reset a group, have it skip that again, and delete it; then its topic."""
    town.parked()
    operator = town.operator(*PARTS)
    operator.groups()
    operator.reset_group("g", "t", "first", by="ada", why="why", source="producer")
    operator.skip_group("g", "t", by="ada", why="why", source="producer")
    operator.delete_group("g", "t", by="ada", why="why")
    newer = "SELECT FROM outbox.message n WHERE (n.topic, n.queue) = (m.topic, m.queue) AND n.position > m.position"
    town.producer.run(f"DELETE FROM outbox.message m WHERE EXISTS ({newer})")
    town.producer.run("UPDATE outbox.message SET visible_at = visible_at - interval '99 days'")
    town.producer.run("DELETE FROM outbox.half_check; DELETE FROM outbox.scheduled_message")
    operator.delete_topic("t", by="ada", why="why")
    declared(town)
    operator.delete_cron("hourly", by="ada", why="why")
    assert not town.consumer.rows("SELECT FROM outbox.consumer_message")


def declared(town: Town) -> None:
    """Have a worker have declared a schedule."""
    owned = Outbox(town.owned["producer"], settings=town.settings)
    owned.every(3600.0, topic="t", name="hourly")(lambda at: None)
    schedules(owned)


def _command(town: Town) -> tuple[UUID, UUID]:
    """Have a saga have sent a command, as the owner; return the ids of both."""
    flow, command = uuid4(), uuid4()
    with town.owned["producer"].begin() as connection:
        execute_module.execute(
            connection,
            flow_sql.start("outbox", id=flow, name="s", content_type="text/plain", body=b""),
            flow_sql.send("outbox", message_id=command, saga_id=flow, number=1, step="a", kind="action"),
        )
    return flow, command


#: What each duty does, by name and part. A duty that reads one database and writes another is there for both.
ACTS: dict[tuple[str, Part], Callable[[Town], None]] = {
    ("send", "producer"): send,
    ("decide", "producer"): decide,
    ("saga", "producer"): saga,
    ("flow control", "producer"): flow_control,
    ("dispatch", "producer"): dispatch,
    ("release", "producer"): release,
    ("check", "producer"): check,
    ("schedule", "producer"): schedule,
    ("intake", "producer"): intake,
    ("publish", "producer"): publish,
    ("prune", "producer"): prune,
    ("confirm", "producer"): confirm,
    ("confirm", "consumer"): confirm,
    ("compensate", "producer"): compensate,
    ("compensate", "consumer"): compensate,
    ("consume", "producer"): consume,
    ("consume", "consumer"): consume,
    ("prune", "consumer"): prune_inbox,
    ("runs", "producer"): ask_for_a_run,
    ("runs", "consumer"): begin_a_run,
    ("reconcile", "producer"): compare,
    ("reconcile", "consumer"): compare,
    ("look", "producer"): look,
    ("look", "consumer"): look,
    **{("prune records", part): prune_records(part) for part in PARTS},
    **{("bulk", part): bulk(part) for part in PARTS},
    **{("report", part): report(part) for part in PARTS},
    **{("order", part): order(part) for part in PARTS},
    **{("groups", part): groups for part in PARTS},
}
