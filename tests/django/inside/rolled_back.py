"""Tests that never commit, as `TestCase` and pytest-django's ``db``: what was sent is handled all the same."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from django.test import TestCase
from shop.models import CustomerPoints
from shop.views import place_order

from outbox.django import send
from outbox.django.testing import NotHandled, drain, sent
from tests.django.inside.messages import points


class OrderTests(TestCase):
    """A request, its message, and what the handlers make of it: all undone at the end."""

    def test_an_order_brings_points(self) -> None:
        """Exactly once, however often it is drained."""
        answer = self.client.post("/orders", {"customer": "alice", "total": "7"})
        assert answer.status_code == 201
        (message,) = sent("order-created")
        assert (message.key, message.body["total"]) == ("alice", 7)
        assert drain() == 1
        assert drain() == 0
        assert points("alice") == 7

    def test_nothing_is_left_of_another_test(self) -> None:
        """The tables are as new."""
        assert sent() == []
        assert not CustomerPoints.objects.exists()

    def test_messages_of_handlers_are_drained_too(self) -> None:
        """Until there is no more; an error reaches the test."""
        send("note", {"do": "answer", "customer": "a"})
        assert drain() == 2
        send("note", {"do": "fail", "customer": "b"})
        with pytest.raises(ValueError, match="no"):
            drain()
        assert points("b") is None

    def test_an_answer_that_is_no_success_is_told(self) -> None:
        """Park and Retry are no effect."""
        send("note", {"do": "park", "customer": "p"})
        with pytest.raises(NotHandled, match="Park"):
            drain()
        assert points("p") is None


@pytest.mark.django_db
def test_the_fixture_db_does_as_well() -> None:
    place_order("bob", 3)
    with (
        patch("shop.messages.CustomerPoints.objects.get_or_create", side_effect=RuntimeError),
        pytest.raises(RuntimeError),
    ):
        drain()
    assert drain() == 1
    assert points("bob") == 3
