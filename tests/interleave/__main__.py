"""``python -m tests.interleave``: explore all orders of all pairs of flows, and print what came of it."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from outbox import embedded
from tests.interleave.explore import Found
from tests.interleave.flows import all_meetings
from tests.interleave.weaver import weaver

LINE = "{:58} {:>9} {:>7} {:>7} {:>9} {:>8}"


def main() -> int:
    """Explore, print a line for each meeting, and fail if an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.interleave", description=__doc__)
    parser.add_argument("--pairs", default="", help="such as send,dispatch:commit,check; default: all, and some threes")
    parser.add_argument("--shard", default="1/1", help="which part of the meetings: 1/2, 2/2")
    parser.add_argument("--kills", action="store_true", help="also a kill and lost connections at each point")
    parser.add_argument("--schedules", type=int, default=60, help="orders of a meeting at most")
    parser.add_argument("--hurts", type=int, default=60, help="kills and lost connections of a meeting at most")
    parser.add_argument("--stop", action="store_true", help="end at the first violation")
    options = parser.parse_args()
    for name in ("outbox", "sqlalchemy"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    pairs = [each.split(",") for each in options.pairs.split(":") if each]
    part, parts = map(int, options.shard.split("/"))
    meetings = all_meetings(pairs)[part - 1 :: parts]
    began, total, failed = time.monotonic(), Found(), 0
    print(LINE.format("flows @ stage", "schedules", "kills", "pruned", "switches", "seconds"))
    with embedded.server([], durable=False, settings={"autovacuum": "off"}) as server, weaver(server) as one:
        for meeting in meetings:
            found = one.explore(meeting, kills=options.kills, schedules=options.schedules, hurts=options.hurts)
            bound = "all" if found.switches is None else f"≤ {found.switches}"
            counts = found.schedules, found.kills, found.pruned
            print(LINE.format(meeting.name, *counts, bound, f"{found.seconds:.1f}"), flush=True)
            for violation in found.violations:
                print(violation, flush=True)
            total.schedules, total.kills, total.pruned = (
                sum(each) for each in zip((total.schedules, total.kills, total.pruned), counts, strict=True)
            )
            failed += bool(found.violations)
            if failed and options.stop:
                break
    seconds = f"{time.monotonic() - began:.0f}"
    print(LINE.format(f"{len(meetings)} meetings", total.schedules, total.kills, total.pruned, "", seconds))
    print(f"{failed} with a violation")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
