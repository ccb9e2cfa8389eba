"""Every page, for everybody who may see it: whole, labelled, with nothing inline and no address of another place."""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Callable
from uuid import UUID, uuid4

import pytest
from fastapi import FastAPI
from sqlalchemy import text as sql_text
from sqlalchemy.orm import Session

from outbox import Message, Park, outcomes
from outbox.acts.changes import Target
from outbox.console import create_console_router
from outbox.console.pages import overview
from outbox.operator.model import Selector
from outbox.testing import bulk
from tests.console.visitor import Page, Visitor
from tests.console.web import GROUP, ROLES, TOPIC, Asker, Http, Shop, authorizer
from tests.operator.health import handler, hold_back, report, sample, this_minute

#: The pages, and what their first heading says.
PAGES = {
    "": "Overview",
    "?window=7d": "Overview",
    "messages": "Messages",
    "messages?topic=nothing": "Messages",
    "dead": "Dead letters",
    "dead?tab=discarded": "Dead letters",
    "halves": "Halves & checks",
    "scheduled": "Scheduled",
    "scheduled?recalled=yes": "Scheduled",
    "inbox": "Inbox",
    "bulk-jobs": "Bulk jobs",
    "sagas": "Sagas",
    "sagas?overdue=yes": "Sagas",
    "reconciliations": "Reconciliation",
    "reconciliations?state=in_sync": "Reconciliation",
    "handlers": "Handlers",
    "groups": "Groups",
    "audit": "Audit",
    "system": "System",
}


@pytest.fixture
def visitor(looking: Http) -> Visitor:
    """Who looks at the museum."""
    return Visitor(looking)


def well_made(page: Page) -> None:
    """See that a page is what assistive technology, the policy, and proxies want."""
    tags = page.tags
    names = [name for name, _ in tags]
    assert names.count("main") == names.count("h1") == 1
    assert next(values.get("href") for name, values in tags if name == "a") == "#main"
    ids = [values["id"] for _, values in tags if values.get("id")]
    assert len(ids) == len(set(ids)), "an id twice"
    assert not [name for name in names if name == "style"]
    assert all(values.get("src") for name, values in tags if name == "script")
    for name, values in tags:
        assert not [key for key in values if key == "style" or key.startswith("on") or key.startswith("hx-on")], name
        for key in ("href", "src", "action", "hx-get", "hx-post"):
            if key in values:
                assert re.match(r"(/(?!/)|#)", values[key]), (name, key, values[key])
        if name == "th":
            assert values.get("scope") in {"col", "row"}
    assert names.count("table") == names.count("caption")


def sends(page: Page) -> list[str]:
    """Where the forms of a page lead that change something."""
    return [form.action for form in page.forms if form.method == "post" and not form.action.endswith("/logout")]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("path", PAGES)
def test_every_page_for_every_role(visitor: Visitor, path: str, role: str) -> None:
    """It is there, says what it is, and marks itself in the navigation."""
    page = visitor.as_role(role).go(path)
    assert page.status == 200
    well_made(page)
    assert PAGES[path] in page.text
    current = [values["href"] for name, values in page.tags if values.get("aria-current") == "page" and name == "a"]
    assert "/" + path.partition("?")[0] in current


def test_nobody_sees_a_page_without_being_let_in(visitor: Visitor) -> None:
    """Who isn't known is asked to log in, and learns nothing, not even whether a message is there."""
    nobody = visitor.as_role(None)
    for path in (*PAGES, f"messages/{uuid4()}", f"bulk-jobs/{uuid4()}"):
        page = nobody.go(path)
        assert nobody.at.startswith("/login")
        assert "Log in" in page.text
        assert TOPIC not in page.text


def test_the_overview_tells_what_needs_a_human(visitor: Visitor) -> None:
    """Problems in sentences that lead to where they are seen; numbers; topics with their groups."""
    page = visitor.go("")
    assert f"3 messages of topic {TOPIC!r} are parked in group {GROUP!r}, the oldest of them (" in page.text
    dead = visitor.go(page.link("are parked in group"))
    assert "no such customer" in dead.text
    # How long it has been so, and the link to where it is healed; of what isn't healed here, what heals it.
    assert re.search(r"are parked in group .*? for [\d.]+\w* See and retry", page.text)
    assert "outbox dead retry" not in page.text
    assert re.search(r"outbox run --app \S+.*? See ", page.text)
    assert page.link("See and retry") == page.link("are parked in group")
    assert re.search(r"Dead letters 3\b", page.text)
    assert any(row.startswith(f"{TOPIC} {GROUP} 0 ") and row.endswith(" 1 3 2 undecided") for row in page.rows)
    assert "No worker is alive" in page.text


def test_the_overview_tells_what_was_decided(acting: Http, shop: Shop) -> None:
    """What was committed and rolled back: the numbers by topic in the API, over time as a chart."""
    shop.orders(1, 2, 3)
    for _ in range(2):
        with Session(shop.engine) as session, session.begin():
            half_id = shop.outbox.prepare(session, TOPIC, {})
        shop.outbox.rollback(half_id)
    shop.drain()
    sample(shop.engine, this_minute(shop.engine) - dt.timedelta(minutes=30), {TOPIC: {"committed": 1}})
    assert "Decisions and checks a minute" in Visitor(acting).go("?window=6h").text
    assert '"rolled_back": 2' in acting.ask("GET", "/api/v1/topics").text.replace('":2', '": 2')


def test_zeros_are_quiet(museum: Shop, make_console: Callable[..., Http]) -> None:
    """Of tiles and cells only those stand out that aren't 0."""
    page = make_console(museum.outbox).ask("GET", "/").text
    assert re.search(r'class="value bad">3<', page)
    assert re.search(r'class="value quiet">0<', page)
    assert not re.search(r'class="value">0<|<td[^>]*>0</td>', page)


def test_a_dead_message_says_so_first(museum: Shop, make_console: Callable[..., Http]) -> None:
    """Before how far it has come at the producer; also one that is tried again; one that is consumed has no more."""
    http = make_console(museum.outbox)

    def badges(key: str) -> list[str]:
        (row,) = http.get("/messages", params={"key": key}).json()["items"]
        page = http.ask("GET", f"/messages/{row['id']}").text
        status = page.partition('aria-label="Status"')[2].partition('<p class="next')[0]
        return re.findall(r"</svg>\s*([a-z ]+)", status)

    assert badges("order-11") == ["parked", "dispatched"]
    assert badges("order-21") == ["failed", "dispatched"]
    assert badges("order-1") == ["dispatched"]


def test_a_message_shows_its_whole_way(visitor: Visitor) -> None:
    """Status and what happens next, each group, the timeline, the body, and what can't be done with the reason."""
    found = visitor.go("messages?key=order-11")
    page = visitor.go(found.link("…"))
    well_made(page)
    for text in (
        "dispatched",
        "Waits for an operator: parked by group billing",
        "Half message written",
        "Parked by group",
        "no such customer",
        '"number": 11',
        "Not possible now",
        "outbox messages show",
        "queue ",
    ):
        assert text in page.text, text
    assert {f"{label}…" for label in ("Retry in billing", "Discard in billing", "Resend")} <= {
        text for _, text in page.links
    }


def test_a_message_shows_what_its_function_raised(acting: Http, shop: Shop) -> None:
    """The error has a section of its own, with the traceback folded, and its place in the timeline."""

    @shop.outbox.two_phase(topic="payments", fenced=False, rollback_on=(LookupError,))
    def pay(card: str) -> None:
        raise LookupError("no such <card>")

    with outcomes() as calls, pytest.raises(LookupError):
        pay("visa")
    page = Visitor(acting).go(f"messages/{calls[0].message_id}")
    well_made(page)
    for text in ("Error of its function", "LookupError: no such <card>", "Traceback", "Its function raised"):
        assert text in page.text, text


def test_processes_that_send_are_shown(acting: Http, shop: Shop) -> None:
    """Beside the workers, with the active instances of their group; the API lists them."""
    sql = """INSERT INTO outbox.producer_process (id, name, producer_group, version, started_at)
             VALUES (:id, :name, 'shop', '1.0', now())"""
    with shop.engine.begin() as connection:
        for name in ("host-1:7", "host-2:8"):
            connection.execute(sql_text(sql), {"id": uuid4(), "name": name})
    page = Visitor(acting).go("handlers")
    well_made(page)
    for shown in ("Producing processes", "host-1:7", "host-2:8"):
        assert shown in page.text, shown
    assert {(each["name"], each["instances"]) for each in acting.get("/producers").json()["items"]} == {
        ("host-1:7", 2), ("host-2:8", 2),
    }  # fmt: skip


def test_a_conversation_is_a_diagram_and_a_table(acting: Http, shop: Shop) -> None:
    """Who sent what to whom, by a handler that answers; the picture needs no script, and the table says the same."""

    @shop.outbox.consumer("question", group="answering")
    def answer(message: Message, session: Session) -> None:
        shop.outbox.send(session, "answer", {"to": str(message.id)})

    @shop.outbox.consumer("answer", group="asking")
    def refuse(message: Message, session: Session) -> Park:
        return Park("an <answer> that is none")

    with Session(shop.engine) as session, session.begin():
        question = shop.outbox.send(session, "question", {})
    for _ in range(2):
        shop.drain()
    page = Visitor(acting).go(f"messages/{question}")
    page = Visitor(acting).go(page.link("as a sequence diagram").removeprefix("/"))
    well_made(page)
    svg = next(values for name, values in page.tags if name == "svg" and values.get("role") == "img")
    assert svg["aria-label"].startswith("Messages between senders and groups: shop, answering, asking.")
    for text in ("question", "answer", "consumed", "parked", "an <answer> that is none", "2 messages that began with"):
        assert text in page.text, text
    found = acting.get(f"/messages/{question}/conversation").json()
    assert [(each["topic"], each["sender"], each["depth"]) for each in found["messages"]] == [
        ("question", "shop", 0), ("answer", "answering", 1),
    ]  # fmt: skip
    assert Visitor(acting).go(f"messages/{uuid4()}/conversation").status == 404


def test_a_long_conversation_is_shown_some_steps_at_a_time(
    acting: Http, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is on one page; a page leads on and back, whichever message it was opened of."""
    monkeypatch.setattr(overview, "STEPS", 2)
    with Session(shop.engine) as session, session.begin():
        first = shop.outbox.send(session, "said-0", {})
        sent = [shop.outbox.send(session, f"said-{n}", {}, conversation=first) for n in range(1, 5)]
    page, seen = Visitor(acting).go(f"messages/{sent[-1]}/conversation"), []
    while True:
        well_made(page)
        seen.append(sorted(set(re.findall(r"said-\d", page.text))))
        if not page.has_link("Later steps"):
            break
        page = Visitor(acting).go(page.link("Later steps").removeprefix("/"))
    assert seen == [["said-0", "said-1"], ["said-2", "said-3"], ["said-4"]]
    assert "Steps 5 to 5 of 5" in page.text
    assert "Steps 3 to 4 of 5" in Visitor(acting).go(page.link("Earlier steps").removeprefix("/")).text
    path = f"messages/{first}/conversation"
    assert "Steps 5 to 5 of 5" in Visitor(acting).go(f"{path}?page=99").text
    assert Visitor(acting).go(f"{path}?page=0").status == 422


def test_who_may_not_act_is_offered_nothing(visitor: Visitor) -> None:
    """A viewer sees neither buttons nor boxes; an operator sees no rollback, no decision, no reveal."""
    dead = visitor.go("inbox?status=parked").link("…")
    for role, seen, unseen in (
        ("viewer", [], ["Retry in", "Resend…", "Compensate…", "Discard in"]),
        ("operator", ["Retry in", "Resend…", "Discard in"], ["Compensate…", "Commit…"]),
    ):
        page = visitor.as_role(role).go(dead)
        assert all(page.has_link(text) for text in seen)
        assert not any(page.has_link(text) for text in unseen)
    viewed = visitor.as_role("viewer")
    for path in ("inbox", "messages", "halves", "scheduled", "dead?tab=discarded"):
        page = viewed.go(path)
        assert sends(page) == [], path
        assert not [values for name, values in page.tags if values.get("form") == "bulk"], path
    assert not viewed.go("dead").has_link("Retry")


def test_a_console_that_only_reads_says_so(museum: Shop, make_console: Callable[..., Http]) -> None:
    """Even an admin is offered nothing there, and a form from elsewhere is refused on a page."""
    visitor = Visitor(make_console(museum.outbox, read_only=True))
    page = visitor.go(visitor.go("inbox?status=parked").link("…"))
    assert "Read only" in page.text
    assert "This console only reads." in page.text
    assert sends(page) == []
    response = visitor.http.ask("POST", f"/messages/{uuid4()}/do/retry", data={"group": GROUP})
    assert response.status_code == 403
    assert "The console only reads" in Page(response).text


def test_pages_are_found_behind_prefix_and_proxy(museum: Shop, ask: Asker) -> None:
    """All links, forms and files have both prefixes, and none names a host; one can go on from each."""
    app = FastAPI()
    app.include_router(create_console_router(museum.outbox, authorizer=authorizer()), prefix="/ops/outbox")
    visitor = Visitor(ask(app, "admin", root_path="/behind"), "/ops/outbox")
    for path in PAGES:
        page = visitor.go(path)
        assert page.status == 200
        well_made(page)
        places = [values.get(key) for _, values in page.tags for key in ("href", "src", "action", "hx-get", "hx-post")]
        assert all(place.startswith(("/behind/ops/outbox/", "#")) for place in places if place)
    message = visitor.go("messages").link("…")
    assert visitor.go(message.removeprefix("/behind")).status == 200


def test_a_message_shows_each_failed_attempt(acting: Http, shop: Shop) -> None:
    """Each attempt has its own error, worker and duration: on the page and in the API, for viewers as well."""
    (message_id,) = shop.parked(7, trouble="<b>closed</b>")
    shop.outbox.operator.retry(message_id, group=GROUP, by="ann")
    shop.drain()
    page = Visitor(acting.as_role("viewer")).go(f"messages/{message_id}")
    well_made(page)
    assert "Failed attempts" in page.text
    assert sum("parked" in row and "<b>closed</b>" in row and str(os.getpid()) in row for row in page.rows) == 2
    found = acting.as_role("viewer").get(f"/messages/{message_id}").json()["attempts"]
    assert [(each["group"], each["attempt"], each["status"]) for each in found] == [(GROUP, 1, "parked")] * 2
    shop.outbox.operator.discard(message_id, group=GROUP, by="ann", why="no dead letter of other tests")


def test_the_page_of_an_bulk_job(acting: Http, shop: Shop) -> None:
    """How far it is, what became of each, by whom and why; and the list of all."""
    ids = shop.parked(1, 2, 3, trouble="not here")
    visitor = Visitor(acting)
    preview = visitor.go("bulk?action=retry&of=inbox&status=parked&error=not+here")
    page = visitor.send(preview.form("/bulk/start"), reason="the customer is there now")
    assert "0 of 3" in page.text
    assert "A worker with the role bulk takes it up." in page.text
    bulk(shop.outbox)
    page = visitor.go(visitor.at)
    well_made(page)
    assert "3 of 3" in page.text
    assert "the customer is there now" in page.text
    assert sum(str(each)[-8:] in page.text for each in ids) == 3
    assert any("Retry 3 parked messages" in row and "done" in row for row in visitor.go("bulk-jobs").rows)


def test_the_page_of_a_bulk_job_tells_what_became_of_them(acting: Http, shop: Shop) -> None:
    """Not that they were made due: the page says what is pending, then what has failed again and with what."""
    ids = shop.parked(51, 52, trouble="still <closed>")
    targets = tuple(Target(each, GROUP) for each in ids)
    job = shop.outbox.operator.start("retry", Selector(targets), by="ann", why="mended")
    bulk(shop.outbox)
    visitor = Visitor(acting.as_role("viewer"))
    page = visitor.go(f"bulk-jobs/{job.id}")
    well_made(page)
    assert "Current states" in page.text
    assert page.link("Look again").endswith(f"/bulk-jobs/{job.id}")
    assert sum("pending" in row for row in page.rows) == 2
    shop.drain()
    page = visitor.go(f"bulk-jobs/{job.id}")
    assert sum("parked" in row and "still <closed>" in row for row in page.rows) == 2
    assert acting.get(f"/bulk-jobs/{job.id}/outcome").json()["counts"] == {"parked": 2}
    assert acting.get(f"/bulk-jobs/{job.id}/items").json()["items"][0]["fates"][0]["error"] == "still <closed>"
    page = visitor.go(f"messages/{ids[0]}")
    well_made(page)
    assert any("Retry in billing" in row and "still <closed>" in row for row in page.rows)
    rows = [row for row in visitor.go("audit").rows if str(job.id)[-8:] in row or str(ids[0])[-8:] in row]
    assert ["bulk end" in row for row in rows] == [True, False]
    assert any(str(ids[0])[-8:] in row for row in visitor.go("audit?each=1").rows)


def test_handlers_show_what_they_do(acting: Http, shop: Shop) -> None:
    """Rate, times, failures, what is in flight, and the lag in messages and in time."""
    numbers = {"topic": TOPIC, "group": GROUP, "seconds": 300.0, "done": 600, "failed": 7, "in_flight": 3}
    numbers |= {"calls": {"30": 19, "60": 1}, "looked": 0.5, "lag": 1234, "waiting_since": "2026-01-01T00:00:00+00:00"}
    duty = f"consume {TOPIC} of {GROUP}"
    report(shop.engine, [duty], [handler("consumer", TOPIC, GROUP)], health={"handler": numbers})
    page = Visitor(acting).go("handlers")
    for shown in ("p50", "2.0", " ms", "7", "3", "1,234"):
        assert shown in page.text


def test_handlers_show_what_holds_them_back(acting: Http, shop: Shop) -> None:
    """Paused, or stopped by a breaker: in the API by a word, on the page by one that leads to the groups."""
    topics = "left", "lost", "paid", "sent"
    report(shop.engine, handlers=[handler("consumer", topic, "mail") for topic in topics])
    hold_back(shop.engine)
    states = dict(zip(topics, ("running", "half_open", "paused", "open"), strict=True))
    assert {row["topic"]: row["state"] for row in acting.get("/handlers").json()["items"]} == states
    page = Visitor(acting).go("handlers")
    well_made(page)
    shown = dict(zip(topics, ("running", "half open", "paused", "breaker open"), strict=True))
    for topic, state in shown.items():
        assert any(row.startswith(f"{topic} consumer") and state in row for row in page.rows), state
    to_groups = [words for href, words in page.links if href.endswith("/groups") and words in shown.values()]
    assert sorted(to_groups) == ["breaker open", "half open", "paused"]


def test_handlers_show_what_has_no_compensation(acting: Http, shop: Shop) -> None:
    """It is visible before an incident that something can't be compensated."""
    report(shop.engine, handlers=[handler("consumer", TOPIC, GROUP), handler("checker", "loans")])
    page = Visitor(acting).go("handlers")
    assert f"No compensation is registered for {TOPIC}:" in page.text
    assert any("alive" in row for row in page.rows)


@pytest.mark.parametrize(
    ("path", "status", "title"),
    [
        (f"messages/{UUID(int=7)}", 404, "Not found"),
        (f"bulk-jobs/{UUID(int=7)}", 404, "Not found"),
        ("nowhere/at-all", 404, "Not found"),
        ("messages/not-an-id", 422, "The request isn't valid"),
        ("?window=3h", 422, "The request isn't valid"),
        ("bulk?action=retry&of=nothing", 422, "The request isn't valid"),
        ("bulk?action=fly&of=inbox", 422, "The request isn't valid"),
    ],
)
def test_errors_are_pages(visitor: Visitor, path: str, status: int, title: str) -> None:
    """With a title, what to do, and the id by which the log has it."""
    page = visitor.go(path)
    assert page.status == status
    well_made(page)
    assert title in page.text
    assert re.search(rf"Error {status} · request [0-9a-f]{{32}}", page.text)


def test_errors_of_the_api_stay_json(looking: Http) -> None:
    """What is asked for below the API and isn't there is told as a problem document."""
    response = looking.get("/nothing")
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"


def test_an_application_keeps_its_own_pages(museum: Shop, ask: Asker) -> None:
    """Included without a prefix, the console answers for nothing that isn't its own."""
    app = FastAPI()
    app.include_router(create_console_router(museum.outbox, authorizer=authorizer()))

    @app.get("/own")
    def own() -> str:
        return "of the application"

    http = ask(app, "admin")
    assert http.ask("GET", "/own").json() == "of the application"
    assert Visitor(http).go("messages").status == 200
    assert http.ask("GET", "/nowhere").json() == {"detail": "Not Found"}


def test_pages_have_numbers(visitor: Visitor) -> None:
    """The first and the last, and those around the page that is shown; beyond them a list goes on by Next."""

    def rows(page: Page) -> list[str]:
        return [href for href, _ in page.links if re.search(r"/messages/[0-9a-f-]{36}", href)]

    first = visitor.go("messages?size=2")
    numbers = [int(text) for href, text in first.links if text.isdecimal() and "size=2" in href]
    assert numbers[:2] == [2, 3]
    assert "\u2026" in first.text
    second = visitor.go(first.link("Next"))
    by_number = visitor.go(next(href for href, text in first.links if text == "2"))
    assert rows(by_number) == rows(second)
    assert rows(by_number) != rows(first)
    assert [values for _, values in by_number.tags if values.get("aria-current") == "page" and not values.get("href")]
    assert rows(visitor.go(by_number.link("Back"))) == rows(first)
    last = visitor.go(f"messages?size=2&page={numbers[-1]}")
    assert rows(last)
    assert not last.has_link("Next")
    assert visitor.go("messages?size=2&page=9999").status == 422
