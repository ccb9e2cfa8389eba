"""Orders are placed here: the order and its message are one transaction."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST

from outbox.django import transactional

from .models import PlacedOrder


@require_POST
def orders(request: HttpRequest) -> JsonResponse:
    """Place an order; the answer comes after its COMMIT."""
    return JsonResponse(place_order(request.POST["customer"], int(request.POST["total"])), status=201)


@transactional(topic="order-created", key=lambda order: order["customer"])
def place_order(customer: str, total: int) -> dict[str, Any]:
    """Write the order; the returned body is sent with it."""
    order = PlacedOrder.objects.create(customer=customer, total=total)
    return {"id": order.pk, "customer": customer, "total": total}
