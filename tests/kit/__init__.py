"""What tests of several folders need: to wait, to run SQL and passes by hand, to age rows, to start and end processes.

`outbox.testing` is for users' tests, and does in one call what a worker would do. Here each pass, each row and each
process is in the test's own hands.
"""

from tests.kit.effort import sample, stride, tries
from tests.kit.passes import consume_all, declare, dispatch_all, rebound, send_each
from tests.kit.processes import ROOT, python, read_until
from tests.kit.tables import Tables, empty, make_odd_schema, open_observer
from tests.kit.threads import at_once
from tests.kit.waiting import PATIENCE, wait_until

__all__ = [
    "PATIENCE",
    "ROOT",
    "Tables",
    "at_once",
    "consume_all",
    "declare",
    "dispatch_all",
    "empty",
    "make_odd_schema",
    "open_observer",
    "python",
    "read_until",
    "rebound",
    "sample",
    "send_each",
    "stride",
    "tries",
    "wait_until",
]
