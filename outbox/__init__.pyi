# The public names, declared once: for type checkers, and for `__init__.py`, which imports each when it is first used.
from outbox.app import Outbox as Outbox
from outbox.errors import OutboxError as OutboxError
from outbox.flow.saga import Flow as Flow
from outbox.flow.saga import Saga as Saga
from outbox.flow.tcc import Participant as Participant
from outbox.message.ids import message_id as message_id
from outbox.message.limits import Breaker as Breaker
from outbox.message.model import Answer as Answer
from outbox.message.model import Counts as Counts
from outbox.message.model import DeadLetter as DeadLetter
from outbox.message.model import Decision as Decision
from outbox.message.model import Delivery as Delivery
from outbox.message.model import Message as Message
from outbox.message.model import Orphan as Orphan
from outbox.message.model import Outgoing as Outgoing
from outbox.message.model import Park as Park
from outbox.message.model import Resolution as Resolution
from outbox.message.model import Retry as Retry
from outbox.message.model import Skip as Skip
from outbox.message.model import Unavailable as Unavailable
from outbox.message.topic import Topic as Topic
from outbox.producer.decorators import INJECTED as INJECTED
from outbox.producer.decorators import CallOutcome as CallOutcome
from outbox.producer.decorators import outcomes as outcomes
from outbox.settings import Settings as Settings
from outbox.telemetry.hooks import Middleware as Middleware
from outbox.worker.worker import Worker as Worker

__version__: str
__all__: list[str]
