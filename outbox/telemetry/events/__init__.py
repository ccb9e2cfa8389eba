"""What the framework tells of itself: each failure, park, refusal and recovery is an event, and so is success.

An event is declared once, in a module of this package: its code, the logger and the level of its record, the sentence,
and the facts. `outbox.telemetry.hooks` passes it on. Times are in seconds; ids are those of the tables. ``error`` is
the exception behind it, whose traceback the record shows.
"""

from outbox.telemetry.events.messages import *  # noqa: F403 - each event that is declared, without a list beside it
from outbox.telemetry.events.settling import *  # noqa: F403
from outbox.telemetry.events.working import *  # noqa: F403
