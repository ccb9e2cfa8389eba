"""A declared topic: what it takes, how it is written, and how a body of an older version is read."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel, Field

from outbox.errors import InvalidHandler, InvalidMessage, VersionUnknown
from outbox.message import content
from outbox.message.topic import VERSION_HEADER, Topic


class Order(BaseModel):
    number: int
    total: Decimal
    currency: str
    placed: dt.date


@dataclasses.dataclass
class Paid:
    order: int
    cents: int = 0


def orders() -> Topic[Order]:
    """Return a topic whose third version is known, with the way from the first."""
    topic = Topic("orders", Order, version=3)

    @topic.upcast(1)
    def _(body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "currency": "EUR"}

    @topic.upcast(2)
    def _(body: dict[str, Any]) -> dict[str, Any]:
        body["number"] = body.pop("id")
        return body

    return topic


NEWEST = {"number": 7, "total": "12.50", "currency": "EUR", "placed": "2026-11-23"}


def test_a_body_of_the_first_version_is_brought_to_the_newest() -> None:
    """Each upcaster makes one step; the model reads the result as it reads JSON."""
    raw = json.dumps({"id": 7, "total": "12.50", "placed": "2026-11-23"}).encode()
    assert orders().decode(raw, content.JSON, {}) == Order.model_validate(NEWEST)


def test_a_body_in_between_skips_the_steps_before() -> None:
    """A body of version 2 isn't touched by the upcaster from 1."""
    raw = json.dumps({"id": 7, "total": "1", "currency": "SEK", "placed": "2026-11-23"}).encode()
    assert orders().decode(raw, content.JSON, {VERSION_HEADER: "2"}).currency == "SEK"


def test_a_body_of_the_newest_version_is_read_as_it_is() -> None:
    """No upcaster runs."""
    raw = json.dumps(NEWEST).encode()
    assert orders().decode(raw, content.JSON, {VERSION_HEADER: "3"}) == Order.model_validate(NEWEST)


def test_a_newer_version_waits_for_a_newer_release() -> None:
    """It isn't InvalidMessage, which would park the message at once: a rollout heals it."""
    with pytest.raises(VersionUnknown, match=r"'orders' is of version 4, newer than this code's 3"):
        orders().decode(b"{}", content.JSON, {VERSION_HEADER: "4"})
    assert not issubclass(VersionUnknown, InvalidMessage)


def test_a_missing_upcaster_is_named() -> None:
    """The message waits for the release that has it."""
    topic = Topic("orders", Order, version=3)
    topic.upcast(1)(lambda body: body)
    assert topic.missing_upcasters() == [2]
    with pytest.raises(VersionUnknown, match=r"nothing brings version 2 to 3; write it with @topic.upcast\(2\)"):
        topic.decode(b"{}", content.JSON, {})


@pytest.mark.parametrize("version", ["", "0", "-1", "two", "1.0", "²", "9" * 5000])
def test_a_version_that_is_none(version: str) -> None:
    """What another program wrote into the header is refused by name; it will never be read."""
    with pytest.raises(InvalidMessage, match="header outbox-version"):
        orders().decode(b"{}", content.JSON, {VERSION_HEADER: version})


def test_an_upcaster_that_fails_names_its_step() -> None:
    """The body doesn't fit what the upcaster expects: it never will."""
    with pytest.raises(InvalidMessage, match=r"'orders' can't be brought from version 2 to 3: KeyError: 'id'"):
        orders().decode(b"{}", content.JSON, {VERSION_HEADER: "2"})


def test_what_is_wrong_names_the_fields_and_no_value() -> None:
    """The text goes into logs and the inbox, and a value may be somebody's secret."""
    with pytest.raises(InvalidMessage) as caught:
        orders().validated({"number": "hunter2", "total": 1, "currency": "EUR"})
    assert str(caught.value) == (
        "a body of topic 'orders' must be a Order: number: Input should be a valid integer, unable to parse string as "
        "an integer; placed: Field required"
    )
    raw = json.dumps(NEWEST | {"total": "hunter2"}).encode()
    with pytest.raises(InvalidMessage, match="total: Input should be a valid decimal") as caught:
        orders().decode(raw, content.JSON, {VERSION_HEADER: "3"})
    assert "hunter2" not in str(caught.value)


def test_many_wrong_fields_are_counted() -> None:
    """A hundred wrong items don't make a text of a hundred lines."""
    topic = Topic("numbers", list[int])
    with pytest.raises(InvalidMessage, match=r"9: Input should .*; and 90 more$"):
        topic.validated(["x"] * 100)


def test_what_is_written_can_be_read() -> None:
    """A model that was changed after it was made, or a dataclass that never was checked, fails at the send."""
    order = Order.model_validate(NEWEST)
    order.number = "seven"  # type: ignore[assignment]  # the mistake
    with pytest.raises(InvalidMessage, match="number: Input should be a valid integer"):
        orders().encode(order)
    with pytest.raises(InvalidMessage, match="cents: Input should be a valid integer"):
        Topic("paid", Paid).encode(Paid(1, "much"))  # type: ignore[arg-type]  # the mistake


def test_fields_go_by_their_aliases() -> None:
    """A reader and the exported schema know the alias."""

    class Shipped(BaseModel):
        order: int = Field(alias="orderNumber")

    topic = Topic("shipped", Shipped)
    raw, kind = topic.encode(topic.validated({"orderNumber": 7}))
    assert (raw, kind) == (b'{"orderNumber":7}', content.JSON)
    assert topic.decode(raw, kind, topic.headers()).order == 7


def test_the_first_version_says_nothing() -> None:
    """So that messages sent before the topic was declared are of version 1, and so are those of other languages."""
    assert Topic("paid", Paid).headers() == {}
    assert Topic("paid", Paid, version=2).headers() == {VERSION_HEADER: "2"}


def test_a_topic_has_a_model() -> None:
    """Without one nothing could be sent but null."""
    missing: Any = None
    with pytest.raises(InvalidHandler, match="topic 'paid' needs the model of its bodies"):
        Topic("paid", missing)


@pytest.mark.parametrize("version", [0, -1, True, "2", 1.0])
def test_versions_count_from_one(version: Any) -> None:
    """Any other number is a mistake in the code."""
    with pytest.raises(InvalidHandler, match="must be a number from 1 on"):
        Topic("paid", Paid, version=version)


def test_upcasters_have_a_version_before_the_topics_and_one_each() -> None:
    """A typo in the number would be found by the first old message only."""
    topic = orders()
    with pytest.raises(InvalidHandler, match="at version 3: no body is brought on from version 3"):
        topic.upcast(3)
    with pytest.raises(InvalidHandler, match="has an upcaster from version 2 already"):
        topic.upcast(2)


def test_a_model_that_nothing_reads() -> None:
    """It is refused where it is declared."""

    class Opaque:
        pass

    with pytest.raises(InvalidHandler, match="can't be read as"):
        Topic("opaque", Opaque)
