"""Looking for something: filters in the URL, pages of lists, and lists that say why they are empty."""

from __future__ import annotations

import datetime as dt
import re
from urllib.parse import parse_qs, urlsplit

import pytest

from outbox.acts.changes import MessageStatus
from outbox.console.pages.lists import PERIODS, pairs_of, read
from outbox.errors import InvalidRequest
from outbox.operator.model import HalfFilter, InboxFilter, MessageFilter
from tests.console.visitor import Page, Visitor
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


def test_what_producers_have_not_learnt_is_in_the_inboxes(visitor: Visitor) -> None:
    """A producer that knows no group finds nothing parked: the page leads to where all of it is."""
    page = visitor.go(f"messages?status=parked&topic={TOPIC}")
    assert keys(page) == []
    assert visitor.go(page.link("What the inboxes have now")).rows
    assert parse_qs(urlsplit(visitor.at).query) == {"status": ["parked"], "topic": [TOPIC]}


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
        ("messages?header=nonsense", "header = 'nonsense' must be a pair, written name=value"),
        ("messages?since=yesterday", "since = 'yesterday' must be a time"),
        ("messages?within=2y", "within = '2y' must be one of"),
        ("messages?status=lost", "lost"),
        ("messages?size=0", "size = '0' must be from 1 to 500"),
        ("messages?after=garbage", "token"),
        ("messages?database=other", "no database 'other' is registered"),
        ("messages?key=%00", "must be a text"),
        ("inbox?message=12", "message = '12' must be an id"),
        ("inbox?attempts=many", "attempts = 'many' must be a whole number"),
        ("inbox?discarded=maybe", "discarded = 'maybe' must be true or false"),
        ("halves?older_than=-1", "older_than = '-1' must be a duration"),
        ("halves?status=lost", "lost"),
        ("audit?until=never", "until = 'never' must be a time"),
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
    assert keys(visitor.go("halves?older_than=60m")) == []


def test_the_audit_leads_to_its_file(visitor: Visitor) -> None:
    """With the same filter, by the endpoint that makes it."""
    link = visitor.go("audit?actor=ada").link("As CSV")
    assert link == "/api/v1/export/audit.csv?actor=ada"
    assert visitor.http.ask("GET", link).headers["content-type"].startswith("text/csv")


def test_a_period_begins_at_a_moment() -> None:
    """It ends now."""
    criteria = read(MessageFilter, pairs_of("within=1h&topic=orders"))
    assert criteria.since is not None
    assert dt.timedelta(0) < dt.datetime.now(dt.UTC) - criteria.since - PERIODS["1h"][1] < dt.timedelta(minutes=1)
    assert criteria.topic == "orders"


def test_a_bulk_job_gets_a_moment_for_a_period(visitor: Visitor) -> None:
    """So that a bulk job on all that the filter fits means the same a minute later."""
    forms = visitor.go(f"messages?within=1h&topic={TOPIC}").forms
    form = next(form for form in forms if form.id == "bulk" and "filter" in dict(form.fields))
    criteria = dict(pairs_of(dict(form.fields)["filter"]))
    assert criteria.keys() == {"topic", "since"}
    assert read(MessageFilter, list(criteria.items())) == read(MessageFilter, pairs_of(dict(form.fields)["filter"]))


def test_fields_become_filters() -> None:
    """Each with its type; what is empty is no condition."""
    assert read(MessageFilter, pairs_of("topic=+&key=")) == MessageFilter()
    query = "status=recalled&status=scheduled&header=x=y=z&body=order.id=42&since=2026-05-24T13:30"
    criteria = read(MessageFilter, pairs_of(query))
    assert criteria.status == (MessageStatus.RECALLED, MessageStatus.SCHEDULED)
    assert (criteria.header, criteria.body) == (("x", "y=z"), ("order.id", "42"))
    assert criteria.since == dt.datetime(2026, 5, 24, 13, 30, tzinfo=dt.UTC)
    assert read(HalfFilter, pairs_of("older_than=1.5m")).min_age == 90
    assert read(InboxFilter, pairs_of("discarded=no&attempts=3")) == InboxFilter(discarded=False, attempts_gte=3)


def test_what_is_too_long_is_no_filter() -> None:
    """Nothing that the database holds is as long; the text itself isn't repeated."""
    with pytest.raises(InvalidRequest, match=r"key = 'y{79} must be at most 1000 characters"):
        read(MessageFilter, [("key", "y" * 1001)])
