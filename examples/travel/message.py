"""Define the commands of the travel agency to the other services."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class TripPlanned(BaseModel):
    """A customer wants to go somewhere: a flight, a hotel and a car are to be booked."""

    model_config = ConfigDict(frozen=True)

    customer: str
    age: int
    destination: str


class PaymentDue(BaseModel):
    """A customer is to pay for all that was booked."""

    model_config = ConfigDict(frozen=True)

    customer: str
    amount: Annotated[Decimal, Field(gt=0, max_digits=14, decimal_places=2)]
