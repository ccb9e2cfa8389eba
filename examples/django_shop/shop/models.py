"""Define the tables of the shop: orders, and the points of its customers."""

from __future__ import annotations

from django.db import models


class PlacedOrder(models.Model):
    """An order of a customer; ``total`` in whole euros."""

    customer = models.CharField(max_length=100)
    total = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.customer}: {self.total}"


class CustomerPoints(models.Model):
    """The points of a customer: one for each euro."""

    customer = models.CharField(max_length=100, unique=True)
    points = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.customer}: {self.points}"
