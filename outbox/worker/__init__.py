"""The worker: the background duties of an `Outbox`, on one clock, until it is stopped.

::

    Worker(outbox).run()      # a process of its own: until SIGTERM; returns the exit code

    with Worker(outbox):      # inside an application or a test
        ...
"""

from outbox.worker.duty import Health
from outbox.worker.worker import Worker

__all__ = ["Health", "Worker"]
