"""Consume: inbox row and offset, with a handler that does nothing, against the same statements by hand."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy.orm import Session

from benchmarks import fill
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, at_least, compared, interleave
from benchmarks.readers import TOPIC, ByHand, Ours
from outbox import Message, Settings

BATCH = 200


def run(lab: Lab) -> Iterator[Figure]:
    """Measure with producer and consumer in one database, and in two."""
    settings = Settings()
    seconds, rounds = lab.scale(10, 3) / 10, lab.scale(9, 3)
    lab.say("consume: filling")
    fill.messages(lab.engine("main"), TOPIC, lab.scale(100_000, 20_000), settings)
    with lab.worker_connection("main") as one, lab.worker_connection("other") as two, lab.psycopg("main") as raw:
        lab.say("consume: no-op handler")
        near = Ours(one, one, settings, _nothing, BATCH)
        far = Ours(two, one, settings, _nothing, BATCH)
        hand = ByHand(raw, settings.queues, BATCH, lambda _raw, _rows: None)
        results = interleave(
            {
                "ours": lambda: near.round(seconds),
                "hand": lambda: hand.round(seconds),
                "far": lambda: far.round(seconds),
            },
            rounds,
        )
    what = f"no-op handler, batch={BATCH}"
    yield at_least(what, "messages", results["ours"], 30_000)
    yield compared(what, "messages", results["ours"], "the same statements by hand", results["hand"], 0.7)
    yield at_least(f"{what}, consumer in another database", "messages", results["far"], 30_000)


def _nothing(message: Message, session: Session) -> None:
    pass


BENCHMARK = Benchmark(run, ("main", "other"))
