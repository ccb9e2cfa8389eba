"""Looking for something: filters in the URL, pages of lists, and lists that say why they are empty."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import pytest

from outbox.console.pages.fields import Fields, fixed, half_filter, inbox_filter, message_filter
from outbox.errors import InvalidRequest
from outbox.operator.model import MessageFilter
from tests.console.reading import Page, Visitor
from tests.console.web import GROUP, TOPIC, Http


@pytest.fixture
def visitor(looking: Http) -> Visitor:
    """Who looks at the museum."""
    return Visitor(looking)


def keys(page: Page) -> list[str]:
    """The keys of the listed orders."""
    return [word for row in page.rows for word in row.split() if word.startswith("order-")]


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("key=order-3", ["order-3"]),
        (f"topic={TOPIC}&status=scheduled", ["order-31"]),
        ("status=scheduled&status=undecided", ["order-42", "order-41", "order-31"]),
        ("body=number%3D5", ["order-5"]),
        ("within=24h&key=order-7", ["order-7"]),
        ("since=2020-01-01T00:00&until=2020-01-02T00:00", []),
        ("topic=elsewhere", []),
        ("status=&topic=&key=order-2&header=", ["order-2"]),
    ],
)
def test_messages_are_filtered(visitor: Visitor, query: str, wanted: list[str]) -> None:
    """Each condition by itself and together; a field left empty is no condition."""
    assert keys(visitor.go(f"messages?{query}")) == wanted


def test_a_filter_is_filled_in_and_sent(visitor: Visitor) -> None:
    """The form is a GET: what was looked for is in the URL, in the fields again, and can be taken away."""
    form = next(form for form in visitor.go("messages").forms if form.action == "/messages")
    page = visitor.send(form, "status=dispatched", key="order-4")
    assert keys(page) == ["order-4"]
    assert parse_qs(urlsplit(visitor.at).query) == {"status": ["dispatched"], "key": ["order-4"]}
    again = next(form for form in page.forms if form.action == "/messages")
    assert ("key", "order-4") in again.fields
    assert ("status", "dispatched") in again.fields
    wider = visitor.go(page.link("key: order-4"))
    assert len(keys(wider)) > 5
    assert "key" not in parse_qs(urlsplit(visitor.at).query)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("messages?header=nonsense", "header 'nonsense' must be written as name=value"),
        ("messages?since=yesterday", "since 'yesterday' must be a time like"),
        ("messages?within=2y", "within '2y' must be one of"),
        ("messages?status=lost", "lost"),
        ("messages?size=0", "size '0' must be a whole number from 1 to 500"),
        ("messages?after=garbage", "token"),
        ("messages?database=other", "no database 'other' is registered"),
        ("messages?key=%00", "has a character that is in no stored text"),
        ("inbox?message=12", "message '12' isn't an id"),
        ("inbox?attempts=many", "attempts 'many' must be a whole number"),
        ("inbox?discarded=maybe", "discarded 'maybe' must be yes or no"),
        ("halves?age=-1", "age '-1' must be a number over 0"),
        ("halves?status=lost", "lost"),
        ("audit?until=never", "until 'never' must be a time like"),
        ("bulk-jobs?state=lost", "lost"),
    ],
)
def test_a_filter_that_is_none_is_explained(visitor: Visitor, path: str, fault: str) -> None:
    """What is wrong is named beside the filter, which keeps what was typed; no row is shown."""
    page = visitor.go(path)
    assert page.status == 422
    assert "This filter can\N{RIGHT SINGLE QUOTATION MARK}t be used." in page.text
    assert fault in page.text
    assert page.rows == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("messages?key=nobody", "Nothing fits this filter"),
        ("inbox?group=nobody", "Nothing fits this filter"),
        ("dead?group=nobody", "No dead letter fits"),
        ("dead?tab=discarded", "Nothing was discarded"),
        ("scheduled?recalled=yes", "Nothing was recalled"),
        ("bulk-jobs", "No bulk job yet"),
        ("handlers", "No worker is seen"),
    ],
)
def test_an_empty_list_says_why(visitor: Visitor, path: str, why: str) -> None:
    """A filter that is too narrow isn't a world without rows; where it is one, there is a way out."""
    page = visitor.go(path)
    assert why in page.text
    if "fits" in why:
        assert len(visitor.go(page.link("Clear the filter" if "filter" in why else "Show all")).text) > len(page.text)


def test_lists_are_paged_to_the_end_and_back(visitor: Visitor) -> None:
    """No row twice, none missed; back page by page, and to the first at once; the filter stays."""
    everything = keys(visitor.go(f"messages?topic={TOPIC}"))
    pages = [visitor.go(f"messages?topic={TOPIC}&size=4")]
    assert re.search(r"\b4 (of [\d,]+\+? )?messages", pages[0].text)
    while pages[-1].has_link("Next"):
        pages.append(visitor.go(pages[-1].link("Next")))
        assert f"topic={TOPIC}" in visitor.at
    assert [key for page in pages for key in keys(page)] == everything
    assert len(pages) > 3
    back = pages[-1]
    for page in reversed(pages[:-1]):
        back = visitor.go(back.link("Back"))
        assert keys(back) == keys(page)
    assert not back.has_link("Back")
    assert keys(visitor.go(pages[-1].link("First"))) == keys(pages[0])


def test_a_token_of_another_filter_is_refused(visitor: Visitor) -> None:
    """Going on with something else would skip rows without a word."""
    following = visitor.go(f"messages?topic={TOPIC}&size=4").link("Next")
    page = visitor.go(following.replace(f"topic={TOPIC}", "topic=other"))
    assert page.status == 422


def test_the_jump_box_leads_to_a_message_or_a_key(visitor: Visitor) -> None:
    """An id is a message (or a bulk job), everything else a key, to the letter."""
    form = visitor.go("system").form("/jump")
    assert keys(visitor.send(form, q="order-6")) == ["order-6"]
    message = visitor.go("messages?key=order-6").link("…").rpartition("/")[2]
    assert "order-6" in visitor.send(form, q=f" {message} ").text
    assert visitor.at == f"/messages/{message}"
    visitor.send(form, q="a&b=c/../d")
    assert parse_qs(urlsplit(visitor.at).query) == {"key": ["a&b=c/../d"]}


def test_inbox_rows_are_filtered(visitor: Visitor) -> None:
    """By status, group, part of the error, and whether they were discarded."""
    assert len(visitor.go("inbox?status=parked").rows) == 4
    assert len(visitor.go("inbox?status=failed").rows) == 2
    assert len(visitor.go("inbox?error=no+such").rows) == 4
    assert len(visitor.go(f"inbox?group={GROUP}&discarded=yes").rows) == 0
    kind = visitor.go("dead").link("List")
    assert len(visitor.go(kind).rows) == 4


def test_halves_are_filtered(visitor: Visitor) -> None:
    """By how they stand; both wait for their check."""
    assert sorted(keys(visitor.go("halves"))) == ["order-41", "order-42"]
    assert keys(visitor.go("halves?status=parked")) == []
    assert keys(visitor.go("halves?age=60")) == []


def test_the_audit_leads_to_its_file(visitor: Visitor) -> None:
    """With the same filter, by the endpoint that makes it."""
    link = visitor.go("audit?actor=ada").link("As CSV")
    assert link == "/api/v1/export/audit.csv?actor=ada"
    assert visitor.http.ask("GET", link).headers["content-type"].startswith("text/csv")


def test_a_span_becomes_a_moment() -> None:
    """So that a bulk job on all that fits means the same a minute later."""
    fields = fixed(Fields.of_query("within=1h&topic=orders"))
    since = fields.since()
    assert since is not None
    assert dt.timedelta(0) < dt.datetime.now(dt.UTC) - since - dt.timedelta(hours=1) < dt.timedelta(minutes=1)
    assert message_filter(fields).topic == "orders"
    assert message_filter(Fields.of_query(fields.query())) == message_filter(fields)


def test_fields_become_filters() -> None:
    """Each with its type; what is empty is no condition."""
    assert message_filter(Fields([("topic", " "), ("key", "")])) == MessageFilter()
    wanted = message_filter(Fields.of_query("status=a&status=b&header=x=y=z&body=order.id=42&since=2026-05-24T13:30"))
    assert wanted.status == ("a", "b")
    assert (wanted.header, wanted.body) == (("x", "y=z"), ("order.id", "42"))
    assert wanted.since == dt.datetime(2026, 5, 24, 13, 30, tzinfo=dt.UTC)
    assert half_filter(Fields.of_query("age=1.5")).min_age == 90
    assert inbox_filter(Fields.of_query("discarded=no&attempts=3")).discarded is False


@pytest.mark.parametrize("read", [lambda f: f.text("x"), lambda f: f.uuid("x"), lambda f: f.pair("x")])
def test_what_is_too_long_is_no_filter(read: Callable[[Fields], object]) -> None:
    """Nothing that the database holds is as long; the text itself isn't repeated."""
    with pytest.raises(InvalidRequest, match="x has 501 characters"):
        read(Fields([("x", "y" * 501)]))
