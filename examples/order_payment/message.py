"""Define the contract of the topic `order-paid`, from the account service to the order service."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TOPIC = "order-paid"
#: What the order service calls itself when it consumes; the account service asks what became of its messages there.
GROUP = "order-service"

CARD, VOUCHER = "card", "voucher"


class OrderPaid(BaseModel):
    """The user was debited: the order is to be marked as paid, and its enterprise credited with the price."""

    model_config = ConfigDict(frozen=True)

    order_id: int
    user: str
    enterprise: str
    price: Annotated[Decimal, Field(gt=0, max_digits=14, decimal_places=2)]
