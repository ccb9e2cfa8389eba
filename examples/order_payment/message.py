"""What the order service tells the balance service: the contract of the topic `order-payment`."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TOPIC = "order-payment"


class PaymentDue(BaseModel):
    """An order was placed: its price is to go from the balance of the user to that of the enterprise."""

    model_config = ConfigDict(frozen=True)

    order_id: int
    user: str
    enterprise: str
    price: Annotated[Decimal, Field(gt=0, max_digits=14, decimal_places=2)]
