"""Many at once by the pages alone: chosen, previewed, ordered, watched, cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text

from outbox.embedded import ServerLike
from outbox.testing import bulk
from tests.console.visitor import Page, Visitor
from tests.console.web import GROUP, Http, Shop
from tests.operator.health import consume, dispatch, send

WHY = "all of these"


def discarded(shop: Shop, ids: list[UUID]) -> int:
    """How many of these are discarded."""
    query = text(
        "SELECT count(*) FROM outbox.consumer_message WHERE message_id = ANY(:ids) AND discarded_at IS NOT NULL"
    )
    with shop.engine.connect() as connection:
        return int(connection.execute(query, {"ids": ids}).scalar_one())


def ticked(page: Page, action: str, *ids: UUID) -> dict[str, object]:
    """What the form of the selected rows sends with these rows ticked and this button pressed."""
    (form,) = [form for form in page.forms if form.id == "bulk" and form.buttons]
    boxes = [value for other in page.forms if other.id == "bulk" for name, value in other.boxes if name == "target"]
    chosen = [value for value in boxes if value.partition("/")[0] in map(str, ids)]
    assert len(chosen) == len(ids)
    assert ("action", action) in form.buttons
    return dict(form.fields) | {"target": chosen, "action": action}


def preview(visitor: Visitor, data: dict[str, object]) -> Page:
    """Ask what would be done."""
    return Page(visitor.http.ask("POST", "/bulk", data=data))


def test_a_selection_is_previewed_ordered_and_done(visitor: Visitor, shop: Shop) -> None:
    """Two of three: the count, a sample, the consequence; then only these, with the reason on record."""
    ids = shop.parked(1, 2, 3, trouble="torn")
    page = preview(visitor, ticked(visitor.go("inbox?error=torn"), "discard", *ids[:2]))
    assert "Discard 2 of 2?" in page.text
    assert "It is accepted that this group never handles it." in page.text
    assert all(str(each)[-8:] in page.text for each in ids[:2])
    assert str(ids[2])[-8:] not in page.text
    assert discarded(shop, ids) == 0
    told = visitor.send(page.form("/bulk/start"), reason=WHY, rate="100")
    assert "Ordered. Workers carry it out." in told.text
    assert "at most 100 a second" in told.text
    bulk(shop.outbox)
    assert discarded(shop, ids) == 2
    assert [row for row in visitor.go("audit?action=discard").rows if WHY in row]


def test_all_that_the_filter_fits(visitor: Visitor, shop: Shop) -> None:
    """More than the page shows; what can't be done is counted with the reason; once more, nothing is left to do."""
    ids = shop.parked(*range(10, 16), trouble="smeared")
    data = ticked(visitor.go("inbox?error=smeared&size=2"), "retry", *ids[-2:]) | {"all": "1"}
    page = preview(visitor, data)
    assert "Retry 6 of 6?" in page.text
    form = page.form("/bulk/start")
    visitor.send(form, reason=WHY)
    first = visitor.at
    bulk(shop.outbox)
    # The same form sent twice is the same bulk job.
    again = visitor.send(form, reason=WHY)
    assert (visitor.at, again.status) == (first, 200)
    left = visitor.go("bulk?action=discard&of=inbox&error=smeared")
    assert "Discard 0 of 6?" in left.text
    assert "6: it failed and will be retried by itself; park it first" in left.text
    assert not [form for form in left.forms if form.buttons and form.action.endswith("/start")]


def test_what_was_confirmed_is_what_runs(visitor: Visitor, shop: Shop) -> None:
    """If the filter fits something else by now, nothing is ordered, and it is said to look again."""
    (first, _) = shop.parked(20, 21, trouble="burnt")
    page = visitor.go("bulk?action=discard&of=inbox&error=burnt")
    assert "Discard 2 of 2?" in page.text
    shop.outbox.operator.retry(first, group=GROUP, by="otto", why="meanwhile")
    refused = visitor.send(page.form("/bulk/start"), reason=WHY)
    assert refused.status == 409
    assert "The selection has changed" in refused.text


def test_a_group_of_dead_letters_is_retried(visitor: Visitor, shop: Shop) -> None:
    """By its kind of error, and no other's."""
    shop.parked(30, 31, trouble="too wet")
    shop.parked(32, trouble="too dry")
    links = [href for href, words in visitor.go("dead").links if words == "Retry all…"]
    (page,) = [page for page in map(visitor.go, links) if "too wet" in page.text]
    assert "Retry 2 of 2?" in page.text
    assert visitor.go("dead").has_link("Retry…")


def test_the_rest_is_cancelled(visitor: Visitor, shop: Shop) -> None:
    """Asked first, with how much is left; then the items say so, and it can't be cancelled twice."""
    shop.parked(40, 41, 42, trouble="lost")
    page = visitor.send(visitor.go("bulk?action=retry&of=inbox&error=lost").form("/bulk/start"), reason=WHY)
    asked = visitor.go(page.link("Cancel the rest"))
    assert "3 of 3 are left" in asked.text
    told = visitor.send(asked.form("/cancel"), reason="a mistake")
    assert "Cancelled: the open items are not done." in told.text
    assert sum("cancelled" in row for row in told.rows) == 3
    assert not told.has_link("Cancel the rest")
    again = visitor.send(asked.form("/cancel"))
    assert again.status == 409
    assert "a mistake" in " ".join(visitor.go("audit?action=bulk").rows)


def test_many_rollbacks_need_their_number_typed(visitor: Visitor, shop: Shop) -> None:
    """The number that stands there, or nothing is ordered."""
    shop.parked(50, 51, trouble="void")
    page = visitor.go("bulk?action=compensate&of=inbox&error=void")
    assert "Compensate 2 of 2?" in page.text
    refused = visitor.send(page.form("/bulk/start"), reason=WHY, typed="3")
    assert refused.status == 422
    assert "type the number as it stands there" in refused.text
    assert "0 of 2" in visitor.send(page.form("/bulk/start"), reason=WHY, typed="2").text


def test_who_may_not_cannot_preview_or_order(visitor: Visitor) -> None:
    """Neither by a link nor by a form; what is missing is named."""
    viewer, operator = visitor.as_role("viewer"), visitor.as_role("operator")
    data = {"action": "retry", "of": "inbox", "all": "1", "reason": WHY}
    assert viewer.go("bulk?action=retry&of=inbox").status == 403
    assert viewer.http.ask("POST", "/bulk", data=data).status_code == 403
    assert viewer.http.ask("POST", "/bulk/start", data=data).status_code == 403
    assert operator.go("bulk?action=compensate&of=inbox").status == 403
    assert operator.http.ask("POST", "/bulk/start", data=data | {"action": "compensate"}).status_code == 403


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({"action": "retry", "of": "inbox"}, "no row is selected"),
        ({"action": "retry", "of": "inbox", "target": "nonsense"}, "target 'nonsense' must be id/group/database"),
        ({"action": "", "of": "inbox"}, "action '' must be one of"),
        ({"action": "retry", "of": "inbox", "all": "1", "filter": "attempts=x"}, "attempts = 'x' must be"),
        ({"action": "retry", "of": "halves", "all": "1"}, "retry can't be done by halves"),
    ],
)
def test_an_order_that_is_none_is_explained(visitor: Visitor, data: dict[str, str], fault: str) -> None:
    """Nothing selected, something that isn't a row, a filter that isn't one."""
    page = preview(visitor, dict(data))
    assert page.status == 422
    assert fault.lower() in page.text.lower()


@pytest.fixture
def two(server: ServerLike, template: str) -> Iterator[tuple[Engine, Engine]]:
    """Two databases, each with dead letters of its own."""
    engines = []
    for name in ("console_east", "console_west"):
        server.create_database(name, template=template)
        engine = create_engine(server.url(name))
        engines.append(engine)
    yield engines[0], engines[1]
    for engine, name in zip(engines, ("console_east", "console_west"), strict=True):
        engine.dispose()
        server.drop_database(name)


def test_one_database_at_a_time(two: tuple[Engine, Engine], make_console: Callable[..., Http]) -> None:
    """A bulk job works in one database: where it could be several, one is asked which; lists show both."""
    from outbox import Park

    for engine in two:
        send(engine, 2)
        dispatch(engine)
        consume(engine, engine, [Park("bad ink"), Park("bad ink")], limit=2)
    visitor = Visitor(make_console({"east": two[0], "west": two[1]}))
    listed = visitor.go("inbox?status=parked")
    assert sorted(row.split()[-1] for row in listed.rows[1:]) == ["east", "east", "west", "west"]
    boxes = [value for form in listed.forms if form.id == "bulk" for _, value in form.boxes if "/" in value]
    asked = preview(visitor, {"action": "retry", "of": "inbox", "target": boxes})
    assert "A bulk job works in one database, and the selected rows are in 2." in asked.text
    east = next(form for form in asked.forms if ("chosen", "east") in form.fields)
    assert "Retry 2 of 2?" in visitor.send(east).text
    by_filter = visitor.go("bulk?action=retry&of=inbox&status=parked")
    west = next(form for form in by_filter.forms if ("chosen", "west") in form.fields)
    chosen = visitor.send(west)
    assert "Retry 2 of 2?" in chosen.text
    assert "0 of 2" in visitor.send(chosen.form("/bulk/start"), reason=WHY).text
