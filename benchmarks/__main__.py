"""Run the benchmarks: ``python -m benchmarks [--only send,dispatch] [--quick] [--markdown]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from benchmarks import table
from benchmarks.lab import Lab, load, measure
from benchmarks.measure import Figure
from outbox import embedded
from outbox.database import migration

NAMES = (
    *("send", "carriers", "dispatch", "consume", "by_key", "effect", "latency", "pinned", "check", "confirm"),
    *("outside", "imports", "reconcile", "dedupe", "wal"),
)
#: Run only when asked for: they take a quarter of an hour each, an hour, ten, five, three, four, five, forty, five, 23,
#: ten, three and 15 minutes (the first two are of the console); these two, the growth and the scattered differences of
#: reconciliations and the dispatch of a backlog take 10, 6, 30, 30 and 12 GB of disk.
_LONG = (
    "console",
    "console_pages",
    "reconcile_growth",
    "endurance",
    "outage",
    "reconcile_backlog",
    "reconcile_stream",
    "reconcile_fleet",
    "reconcile_scattered",
    "reconcile_cost",
    "reconcile_follow",
    "reconcile_columns",
    "dispatch_backlog",
    "relay",
    "relay_outage",
    "rocketmq",
)

#: So that a checkpoint of a server set up for a small machine doesn't fall into one round and not into the other.
SERVER_SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}
_TEMPLATE = "migrated"


def main() -> None:
    """Run the benchmarks asked for, each in a process of its own, and print the table."""
    options = _options()
    results: dict[str, tuple[Sequence[Figure], float]] = {}
    with embedded.server([_TEMPLATE], durable=True, settings=SERVER_SETTINGS) as server:
        migration.upgrade(server.url(_TEMPLATE))
        for name in options.only:
            databases = {each: f"{name}_{each}" for each in load(name).databases}
            for database in databases.values():
                server.create_database(database, template=_TEMPLATE)
            lab = Lab({each: server.url(database) for each, database in databases.items()}, options.quick)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                results[name] = process.submit(measure, name, lab).result()
            for database in databases.values():
                server.drop_database(database)
            lab.say("")
    if options.markdown:
        print(table.markdown(results))
    else:
        table.show(results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure the outbox against its baselines.")
    parser.add_argument(
        "--only",
        type=partial(table.names, known=(*NAMES, *_LONG)),
        default=NAMES,
        metavar="NAMES",
        help=f"some of {','.join((*NAMES, *_LONG))}, separated by commas",
    )
    parser.add_argument("--quick", action="store_true", help="few and short rounds: rough figures within a minute")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
