"""Bank B where a broker is between the banks: it takes the transfers in, credits them, and answers each.

Its consumer reads a topic of its own database, and is the same as without a broker. The answer is sent in the
transaction that credits. What can't be credited isn't parked, for it is final as soon as bank A hears of it.

Each of the three is for a worker of its own, so that each can be killed by itself.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from outbox import Message, Outbox

from . import bank_b
from .bank_b import engine
from .message import GROUP, OUTCOMES, TOPIC, TransferEnded, TransferOrdered
from .via import Between, relay, take_in

__all__ = ["TAKEN", "credit_and_answer", "engine", "intake", "outbox", "publisher"]

#: The topic that is taken in, and what its messages are.
TAKEN = TOPIC, TransferOrdered

_between = Between.of_environment()
outbox = Outbox(engine, group=GROUP)
publisher = Outbox(engine, group=GROUP)
relay(publisher, OUTCOMES, _between)
intake = Outbox(engine, group=GROUP)
take_in(intake, TOPIC, GROUP, _between)


@outbox.consumer(TOPIC, group=GROUP, model=TransferOrdered, batch=50, retry_delays=(0.5, 1, 2, 5))
def credit_and_answer(message: Message, session: Session) -> None:
    """Credit the receiver as `bank_b.credit` does, and tell bank A what became of it: both, or neither."""
    transfer: TransferOrdered = message.body
    refused = bank_b.credit(message, session)
    ended = TransferEnded(transfer_id=transfer.transfer_id, objection=None if refused is None else refused.reason)
    outbox.send(session, OUTCOMES, ended, key=str(transfer.sender))
