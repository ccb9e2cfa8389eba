"""For the tests of services that use the outbox: run what a worker would run, here and now; see the messages sent.

Its page is docs/testing.md. Fixtures for pytest are in `outbox.pytest_plugin`.
"""

from outbox.testing.capture import capture as capture
from outbox.testing.due import advance as advance
from outbox.testing.due import make_due as make_due
from outbox.testing.faults import Killed as Killed
from outbox.testing.faults import NotIdempotent as NotIdempotent
from outbox.testing.faults import failing as failing
from outbox.testing.faults import killing as killing
from outbox.testing.faults import running_twice as running_twice
from outbox.testing.passes import NotQuiet as NotQuiet
from outbox.testing.passes import bulk as bulk
from outbox.testing.passes import check as check
from outbox.testing.passes import confirm as confirm
from outbox.testing.passes import drain as drain
from outbox.testing.passes import schedules as schedules
from outbox.testing.runners import arolling_back as arolling_back
from outbox.testing.runners import on_loop as on_loop
from outbox.testing.runners import rolling_back as rolling_back
from outbox.testing.sent import Partial as Partial
from outbox.testing.sent import SentMessage as SentMessage
from outbox.testing.sent import SentMessages as SentMessages
from outbox.testing.sent import assert_not_sent as assert_not_sent
from outbox.testing.sent import assert_sent as assert_sent
from outbox.testing.sent import sent_messages as sent_messages
