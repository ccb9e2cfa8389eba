"""A town with something of everything that the console shows, some of it hostile."""

from __future__ import annotations

import dataclasses
import datetime as dt
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.orm import Session

from outbox import Resolution, testing
from outbox.acts.changes import Actor, Target
from outbox.database.execute import execute
from outbox.flow import sql
from outbox.message.model import Status, uuid7
from outbox.operator.model import InboxFilter, PageRequest, Selector
from outbox.reconcile.job import Access, Job, Pair, Window
from outbox.reconcile.measure import Measure
from outbox.reconcile.run import reconcile
from tests.console.browser.town import CLERK, CREDIT, NOTE, Town
from tests.kit import wait_until
from tests.operator.health import sample, this_minute

#: Whatever of this is taken for markup sets ``window.hacked``, or is asked for.
HOSTILE = (
    """'"><script>window.hacked='script'</script><img src=x onerror="window.hacked='image'">"""
    """<svg/onload=window.hacked='svg'><p hx-get="hacked" hx-trigger="load">{{ 7*7 }}</p>"""
)
HOSTILE_NAME = "<b onmouseover=window.hacked=1>x"
LOAN = "loan"
#: A topic may have these letters; taken for an encoded URL, they are markup.
TOPIC_LIKE_MARKUP = "%3Cscript%3Ewindow|hacked"
ACTOR = Actor("anna", {"via": "cli"})


@dataclass(frozen=True)
class Museum:
    """Where the console is, and the ids of what is in it."""

    town: Town
    console: str
    consumed: UUID
    parked: UUID
    rolled_back: UUID
    hostile: UUID
    failing: UUID
    discarded: UUID
    scheduled: UUID
    half: UUID
    parked_half: UUID
    done: UUID
    retried: UUID
    running: UUID
    run: UUID
    flow: UUID
    doubtful: UUID

    def at(self, path: str) -> str:
        """Return a path with the ids that it names: ``messages/{parked}``."""
        return path.format_map({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


def furnish(town: Town, console: str) -> Museum:
    """Do all that leaves something to look at."""
    operator = town.operator
    town.bank_b.reconciliation(at="03:00", timezone="Europe/Berlin")
    town.bank_a.checker(LOAN, max_checks=1)(_undecided)
    consumed, *_ = transfers = [town.transfer(amount) for amount in ("10.00", "20.00", "30.00")]
    parked = [town.transfer("5.00", receiver) for receiver in ("BB-404", "BB-405", "BB-406")]
    hostile = town.note(HOSTILE, key=HOSTILE[:200], tag=HOSTILE_NAME, headers={HOSTILE_NAME: HOSTILE, "plain": "yes"},
                        body={HOSTILE: HOSTILE, "password": "secret", "order": {"id": 42}})  # fmt: skip
    failing = town.note(HOSTILE, park=False, key="failing")
    discarded, *queued = [town.note(f"no form {number}", key="form") for number in range(6)]
    recalled, scheduled = town.note(delay=86_400, key="late"), town.note(delay=43_200, key="soon")
    with Session(town.a) as session, session.begin():
        town.bank_a.send(session, TOPIC_LIKE_MARKUP, {"plain": "text only"}, headers={"=cmd": "=1+1"})
    half, parked_half = (town.prepare(topic) for topic in ("quiet", LOAN))
    town.settled([*transfers, *parked, hostile, failing, discarded, *queued])
    testing.check(town.bank_a)
    operator.act("recall", Target(recalled), by=ACTOR, why="=1+1")
    operator.act("discard", Target(discarded, CLERK), by=ACTOR, why=HOSTILE)
    rollback = operator.start("compensate", Selector((Target(parked[0]),)), by=ACTOR, why="no such account")
    retry = operator.start("retry", Selector((Target(parked[1], CREDIT),)), by=Actor(HOSTILE), why=HOSTILE)
    slow = operator.start(
        "retry", Selector(tuple(Target(each, CLERK) for each in queued)), by=ACTOR, why="slowly", rate=0.001
    )
    for each in (rollback.id, retry.id):
        town.carried_out(each)
    wait_until(lambda: operator.bulk_job(slow.id).started_at, "the slow one has begun")
    wait_until(
        lambda: operator.inbox(InboxFilter(message_id=parked[1], status=(Status.PARKED,)), PageRequest()).items, "again"
    )
    wait_until(operator.workers, "workers report")
    # What workers write down once a minute: charts are there from the beginning, one of them of groups with long names.
    lags = {LOAN: {"department-of-mortgages-and-securities": {"lag": 7}}, NOTE: {CLERK: {"lag": 6}}}
    lags["settlement-instructions"] = {"reconciliation": {"lag": 1_234_567}}
    sample(town.b, this_minute(town.b) - dt.timedelta(minutes=5), {}, lags)
    return Museum(
        town, console, consumed, parked[1], parked[0], hostile, failing, discarded, scheduled, half, parked_half,
        rollback.id, retry.id, slow.id, _reconciled(town), *_flow(town),
    )  # fmt: skip


def _reconciled(town: Town) -> UUID:
    """Compare the notes with what their clerk did with them, and return the run."""
    producer, consumer = (Access(engine.url.render_as_string(False), town.settings) for engine in (town.a, town.b))
    sums = f"SELECT $q${HOSTILE}$q$ AS clerk, {{}} AS notes, {{}} AS weight"
    measure = Measure(
        "weighed", NOTE, CLERK, ("clerk",), ("notes", "weight"),
        producer=sums.format(8, "1234567.10"), consumer=sums.format(8, "1234566.05"),
    )  # fmt: skip
    job = Job(producer, consumer, (Pair(NOTE, CLERK),), window=Window(grace=0.0), measures=(measure,))
    return reconcile(job).pairs[0].run_id


def _flow(town: Town) -> tuple[UUID, UUID]:
    """Have a flow of a saga that waits for an answer; return its id, and that of the command which isn't answered."""
    flow, done, doubtful, undo = (uuid7() for _ in range(4))
    schema = town.settings.schema
    commands = [(done, "flight", "action"), (doubtful, HOSTILE_NAME, "action"), (undo, "flight", "compensation")]
    with town.a.begin() as connection:
        execute(
            connection,
            sql.start(schema, id=flow, name="trip", content_type="application/json", body=b"{}"),
            *(
                sql.send(schema, message_id=each, saga_id=flow, number=number, step=step, kind=kind)
                for number, (each, step, kind) in enumerate(commands, 1)
            ),
            sql.answer(schema, command=done, answer="done", reason=None, result_type="application/json", result=b"{}"),
            sql.overdue(schema, command=doubtful),
            sql.answer(schema, command=undo, answer="refused", reason=HOSTILE, result_type=None, result=None),
            sql.change(schema, id=flow, status="compensating", reason=HOSTILE, ended=False),
        )
    return flow, doubtful


def _undecided(_: object) -> Resolution:
    return Resolution.UNKNOWN
