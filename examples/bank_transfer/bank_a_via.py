"""Bank A where a broker is between the banks: it relays its transfers, and learns from bank B how they ended.

It has no access to bank B's database, so it can't ask bank B's inbox, as `bank_a_settlement` does. Bank B says of each
transfer that it has credited it, or that it never will; the second is what a refund needs to know.

Each of the three is for a worker of its own, so that each can be killed by itself.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from outbox import Message, Outbox

from . import bank_a_tcc
from .bank_a_tables import engine, outbox, settle_as_credited, settle_by_refund
from .message import GROUP_A, OUTCOMES, TOPIC, TransferEnded
from .via import Between, relay, take_in

__all__ = ["TAKEN", "engine", "intake", "outbox", "publisher", "settle"]

#: The topic that is taken in, and what its messages are.
TAKEN = OUTCOMES, TransferEnded
#: Without it, nothing would decide what a try has left undecided.
VERDICT = bank_a_tcc.verdict

_between = Between.of_environment()
publisher = Outbox(engine, group=GROUP_A)
relay(publisher, TOPIC, _between)
intake = Outbox(engine, group=GROUP_A)
take_in(intake, OUTCOMES, GROUP_A, _between)


@outbox.consumer(OUTCOMES, group=GROUP_A, model=TransferEnded, batch=50, retry_delays=(0.5, 1, 2, 5))
def settle(message: Message, session: Session) -> None:
    """Note that a transfer is credited, or give the sender the money back.

    Raises:
        RefundedBefore: bank B has contradicted itself.
    """
    ended: TransferEnded = message.body
    if ended.objection is None:
        settle_as_credited(ended.transfer_id, session)
    else:
        settle_by_refund(ended.transfer_id, session)
