"""Sagas in the console: flows by their state, one with its commands, and an answer for a participant that doesn't."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from outbox import Settings
from tests.console.test_pages_look import well_made
from tests.console.visitor import Visitor
from tests.console.web import Http, Shop, console_of
from tests.flow.support import World

WHY = {"reason": "by phone"}


@pytest.fixture
def world(shop: Shop) -> World:
    """Trips, whose hotel doesn't answer."""
    return World(shop.engine, (shop.engine,) * 3, replace(Settings(), immunity=0.0), silent={"hotel"})


@pytest.fixture
def doubtful(world: World) -> UUID:
    """A trip whose hotel is overdue."""
    trip = world.start()
    world.go()
    world.late()
    return trip


def command_of(world: World, trip: UUID) -> UUID:
    """Return the command of the hotel."""
    (found,) = (each.message_id for each in world.flow(trip).commands if each.step == "hotel")
    return found


def test_the_endpoints(acting: Http, world: World, doubtful: UUID) -> None:
    """Flows by their state, one with its commands, an answer; and what there isn't."""
    (row,) = (each for each in acting.get("/sagas?overdue=true").json()["items"] if each["id"] == str(doubtful))
    assert (row["saga"], row["status"], row["step"]) == ("trip", "compensating", "flight")
    view = acting.get(f"/sagas/{doubtful}").json()
    assert [each["step"] for each in view["commands"]] == ["flight", "hotel", "flight"]
    hotel = command_of(world, doubtful)
    path = f"/sagas/commands/{hotel}/answer"
    assert acting.post(path, {"answer": "done"}).status_code == 422
    assert acting.post(path, {"answer": "maybe", **WHY}).status_code == 422
    said = acting.post(path, {"answer": "refused", **WHY})
    assert (said.status_code, said.json()["outcome"].endswith("is answered: refused")) == (200, True)
    world.go()
    assert world.flow(doubtful).status == "compensated"
    assert acting.post(path, {"answer": "done", **WHY}).status_code == 409
    assert acting.get(f"/sagas/{hotel}").status_code == 404
    assert acting.post(f"/sagas/commands/{doubtful}/answer", {"answer": "done", **WHY}).status_code == 404


def test_a_filter_of_flows_is_saved(visitor: Visitor, doubtful: UUID) -> None:
    """As those of other lists are; it leads to the flows that it selects."""
    page = visitor.go("sagas?saga=trip&overdue=yes")
    saved = visitor.send(visitor.go(page.link("Save this filter")).form("/acts/save_filter"), filter="late trips")
    assert str(doubtful) in str(visitor.go(saved.link("late trips")).links)


def test_only_an_admin_answers(acting: Http, ask: object, shop: Shop, world: World, doubtful: UUID) -> None:
    """Neither by the API nor by a page, which doesn't offer it; nor from another site, nor where all only read."""
    hotel = command_of(world, doubtful)
    form = "/acts/answer"
    viewing: Http = ask(console_of(shop.outbox, read_only=True), "admin")  # type: ignore[operator]
    for http in (acting.as_role("viewer"), acting.as_role("operator"), viewing):
        assert http.get(f"/sagas/{doubtful}").status_code == 200
        assert http.post(f"/sagas/commands/{hotel}/answer", {"answer": "done", **WHY}).status_code == 403
        data = {"command": str(hotel), "answer": "done", **WHY}
        assert http.ask("POST", form, data=data, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 403
    visitor = Visitor(acting.as_role("operator"))
    assert "Answer…" not in visitor.go(f"sagas/{doubtful}").text
    assert visitor.go(f"acts/answer?command={hotel}").status == 403
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
        assert acting.ask("POST", form, data=data, headers=headers).status_code == 403
    world.go()
    assert world.flow(doubtful).status == "compensating"


def test_the_pages(acting: Http, world: World, doubtful: UUID) -> None:
    """From the list to the flow, and to its answer, which is confirmed before; a result that isn't JSON says so."""
    visitor = Visitor(acting).as_role("admin")
    for query in ("", "?open=yes", "?overdue=yes", "?status=compensating&saga=trip"):
        page = visitor.go(f"sagas{query}")
        well_made(page)
        assert any(str(doubtful) in href for href, _ in page.links), query
    assert "Nothing fits this filter" in visitor.go("sagas?saga=none").text
    page = visitor.go(f"sagas/{doubtful}")
    well_made(page)
    assert "hotel has not answered within 60 s" in page.text
    hotel = command_of(world, doubtful)
    assert any(href.endswith(f"/messages/{hotel}") for href, _ in page.links)
    page = visitor.go(page.link("Answer…"))
    well_made(page)
    page = visitor.send(page.form("/answer"), answer="done", result="{", reason="by phone")
    assert (page.status, "The result isn't JSON" in page.text) == (422, True)
    page = visitor.send(page.form("/answer"), answer="done", result="", reason="by phone")
    assert "Answered: the saga goes on" in page.text
    world.go()
    assert world.flow(doubtful).status == "compensated"
    page = visitor.go(f"sagas/{doubtful}")
    assert "Answer…" not in page.text
    assert "It is answered already: done" in visitor.go(f"acts/answer?command={hotel}").text
