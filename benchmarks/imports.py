"""Import: what ``import outbox`` costs a program, in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, Ratio, interleave, milliseconds

_TIMED = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


def run(lab: Lab) -> Iterator[Figure]:
    """Measure the package alone, and with the class that every application imports."""
    statements = {
        "sqlalchemy": "import sqlalchemy",
        "import outbox": "import outbox",
        "from outbox import Outbox": "from outbox import Outbox",
    }
    arms = {name: partial(_import, _TIMED.format(statement)) for name, statement in statements.items()}
    lab.say("imports")
    results = interleave(arms, lab.scale(31, 5))
    for name in ("import outbox", "from outbox import Outbox"):
        ratio = Ratio.of(results[name], results["sqlalchemy"])
        ours, baseline = milliseconds(results[name]), milliseconds(results["sqlalchemy"])
        yield Figure(f"{name} ÷ import sqlalchemy", ours, baseline, ratio, "≤ 1.30", ratio.median <= 1.3)


def _import(code: str) -> float:
    """Return milliseconds."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout) * 1000


BENCHMARK = Benchmark(run, ())
