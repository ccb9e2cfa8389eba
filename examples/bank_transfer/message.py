"""What bank A asks and tells bank B: the contract of the topic `transfer`, and all that the two banks share."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TOPIC = "transfer"
#: Where a broker is between the banks, bank B tells bank A by messages of this topic what became of each transfer.
OUTCOMES = "transfer-outcome"
#: What bank B calls itself when it consumes; bank A asks what became of its messages there.
GROUP = "bank-b"
#: What bank A calls itself when it consumes.
GROUP_A = "bank-a"

#: Money is a decimal with two places, in the databases (numeric(14,2)) and on its way (a JSON string).
Money = Annotated[Decimal, Field(max_digits=14, decimal_places=2)]
#: The most that an account may hold.
RICHEST = Decimal("999999999999.99")


class TransferOrdered(BaseModel):
    """The sender was debited; the receiver is to be credited with the same amount.

    ``transfer_id`` is the id of the payment order. ``sender`` is an account of bank A, ``receiver`` one of
    bank B: the code of a bank, a hyphen, and the number of an account there.
    """

    model_config = ConfigDict(frozen=True)

    transfer_id: int
    sender: int
    receiver: str
    amount: Annotated[Money, Field(gt=0)]
    purpose: str = ""


class TransferEnded(BaseModel):
    """What became of a transfer at bank B: it is credited, or an objection stands against that for good."""

    model_config = ConfigDict(frozen=True)

    transfer_id: int
    objection: str | None


class Inquiry(BaseModel):
    """Bank A asks before it debits: would bank B credit this?"""

    model_config = ConfigDict(frozen=True)

    transfer_id: int
    receiver: str
    amount: Annotated[Money, Field(gt=0)]


class Reply(BaseModel):
    """What bank B has against it at this moment; None is nothing."""

    model_config = ConfigDict(frozen=True)

    objection: str | None
