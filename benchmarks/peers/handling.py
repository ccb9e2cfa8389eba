"""Handling: an effect that is exactly once, one by one and in batches, and no effect at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.lab import Lab
from benchmarks.peers import hand, ours
from benchmarks.peers.contest import Arm, Bar, Costs, contest
from benchmarks.peers.queues import AT_ONCE, FaststreamArms, PgmqArms, PgQueuerArms, ProcrastinateArms
from benchmarks.usage import ServerProcesses

#: The databases of the arms.
DATABASES = ("ours", "hand", "pgmq", "pgqueuer", "procrastinate", "faststream")

ONE, EACH, LIST, NOTHING = (
    "exactly-once effect, one message a transaction",
    "exactly-once effect, batch=100, a call each",
    "exactly-once effect, batch=100, the list at once",
    "no effect, batch=100",
)
BARS = {
    ONE: (
        Bar("one by one, session ÷ hand-written loop", "ours, session", "hand-written loop", 0.80),
        Bar("one by one, cursor ÷ hand-written loop", "ours, cursor", "hand-written loop", 0.80),
    ),
    EACH: (
        Bar("session ÷ pgmq's loop", "ours, session", "pgmq", 1.0),
        Bar("cursor ÷ pgmq's loop", "ours, cursor", "pgmq", 1.5),
        Bar("cursor in a pipeline ÷ hand-written pipeline", "ours, cursor, pipeline", "hand-written pipeline", 0.6),
    ),
    NOTHING: (
        Bar("no effect, a call each ÷ pgmq", "ours, a call each", "pgmq", 1.5),
        Bar("no effect, the list ÷ pgmq", "ours, list", "pgmq", 1.5),
    ),
}


def contests(
    lab: Lab, server: ServerProcesses, arms: dict[str, dict[str, Arm]]
) -> Iterator[tuple[str, dict[str, Costs]]]:
    """Yield the costs of each contest."""
    rounds = lab.scale(7, 1)
    messages = {ONE: lab.scale(400, 60), EACH: lab.scale(2_000, 400)}
    for what, of_peers in arms.items():
        yield what, contest(of_peers, messages.get(what, lab.scale(8_000, 1_000)), rounds, server, lab.say)


def arms(lab: Lab, stack: ExitStack) -> dict[str, dict[str, Arm]]:
    """Return the arms of each contest, whose tables are installed from then on."""
    mine, by_hand = ours.OurArms(lab.urls["ours"], stack), hand.HandArms(lab.urls["hand"], stack)
    pgmq, pgqueuer = PgmqArms(lab.urls["pgmq"], stack), PgQueuerArms(lab.urls["pgqueuer"], stack)
    procrastinate = ProcrastinateArms(lab.urls["procrastinate"], stack)
    faststream = FaststreamArms(lab.urls["faststream"], stack)
    return {
        ONE: {
            "ours, session": mine.arm(ours.credit, batch=1),
            **dict(mine.cursor_arms(batch=1)),
            "hand-written loop": by_hand.arm(hand.each, 1),
            "pgmq": pgmq.arm(1),
            "PgQueuer": pgqueuer.arm(pgqueuer.credit, batch=1, at_once=1),
            "procrastinate": procrastinate.arm(procrastinate.credit, at_once=1),
            "faststream-outbox": faststream.arm(faststream.credit, batch=1, at_once=1),
        },
        EACH: {
            "ours, session": mine.arm(ours.credit, batch=100),
            **dict(mine.cursor_arms(batch=100)),
            "hand-written loop": by_hand.arm(hand.each),
            "hand-written pipeline": by_hand.arm(hand.each_in_pipeline),
            "pgmq": pgmq.arm(100),
            "PgQueuer": pgqueuer.arm(pgqueuer.credit, batch=100, at_once=AT_ONCE),
            "procrastinate": procrastinate.arm(procrastinate.credit, at_once=AT_ONCE),
            "faststream-outbox": faststream.arm(faststream.credit, batch=100, at_once=AT_ONCE),
        },
        LIST: {
            "ours": mine.arm(ours.credit_all, batch=100, takes_batch=True),
            "hand-written": by_hand.arm(hand.at_once),
        },
        NOTHING: {
            "ours, a call each": mine.arm(ours.nothing, batch=100),
            "ours, list": mine.arm(ours.nothing_all, batch=100, takes_batch=True),
            "hand-written queue": by_hand.arm(None),
            "hand-written log, read by range": by_hand.log(),
            "pgmq": pgmq.arm(100, effect=False),
            "PgQueuer": pgqueuer.arm(pgqueuer.nothing, batch=100, at_once=100),
            "procrastinate": procrastinate.arm(procrastinate.nothing, at_once=AT_ONCE),
            "faststream-outbox": faststream.arm(faststream.nothing, batch=100, at_once=AT_ONCE),
        },
    }
