"""What bank A tells bank B: the contract of the topic `transfer`, and all that the two banks share."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TOPIC = "transfer"

#: Money is a decimal with two places, in the databases (numeric(14,2)) and on its way (a JSON string).
Money = Annotated[Decimal, Field(max_digits=14, decimal_places=2)]


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
