"""The script for spark-submit: ``outbox reconcile`` with the arguments that follow it, as they are.

::

    spark-submit --master yarn … submit.py --engine spark --topic transfer --group bank_b --since 24h

Also ``python -m outbox.reconcile.spark.submit …``. The exit code is that of ``outbox reconcile``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the command line of this package."""
    # Of a script, Python puts the folder first on its path, where this package's modules aren't meant to be found.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    sys.argv[1:1] = ["reconcile"]
    # By name: what lies above is started, not imported.
    runpy.run_module("outbox.cli", run_name="__main__")


if __name__ == "__main__":
    main()
