"""Messages by what became of them, as an operator lists them in Python, by HTTP and with the command."""

from __future__ import annotations

import datetime as dt
import json
from uuid import UUID

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from outbox import Message
from outbox.acts.changes import MessageStatus
from outbox.cli import main
from outbox.console import AllowAll, create_console_router
from outbox.operator.model import BulkItemFilter, MessageFate, MessageFilter, PageRequest, Selector
from tests.delivery.support import Post, refuse
from tests.kit import dispatch_all


def by_body(message: Message, session: object) -> None:
    """Fail at what says so."""
    if message.body == "fails":
        raise ValueError("no such account")


@pytest.fixture
def fates(post: Post) -> dict[str, UUID]:
    """Messages of all fates at group ``g``, and one that it has yet to read; names and ids."""
    ids = {name: post.send("fails" if name in {"failed", "parked"} else name)[0] for name in
           ("parked", "consumed", "failed", "lost", "resend_exhausted", "compensated")}  # fmt: skip
    (ids["expired"],) = post.send("expired", expires_at=dt.datetime(2020, 1, 1, tzinfo=dt.UTC))
    post.consume(post.declare(by_body, retry_delays=(60,)))
    post.sink.operator.park(ids["parked"], group="g", by="me", why="test")
    post.lose(ids["lost"], ids["resend_exhausted"], ids["compensated"])
    post.confirm()
    unconsumed = "UPDATE outbox.delivery SET status = 'resend_exhausted', settled = true WHERE half_id = :id"
    post.at_a.run(unconsumed, id=ids["resend_exhausted"])
    post.at_a.run(
        "INSERT INTO outbox.compensation (half_id, function, requested_by, reason) VALUES (:id, 'f', 'me', 'test')",
        id=ids["compensated"],
    )
    ids["unread"] = post.send("unread")[0]
    with post.producer.begin() as connection:
        ids |= {name: post.app.send(connection, "t", name, delay=3600) for name in ("scheduled", "recalled")}
    dispatch_all(post.producer, post.app.settings)
    post.app.operator.recall(ids.pop("recalled"), by="me", why="test")
    with post.producer.begin() as connection:
        ids["committed"] = post.app.send(connection, "t", "committed")
    return ids


#: What each status finds, by name.
FOUND = {
    "consumed": {"consumed"},
    "unconsumed": {"lost", "compensated", "unread", "scheduled", "committed"},
    "failed": {"failed"},
    "parked": {"parked"},
    "expired": {"expired"},
    "resend_exhausted": {"resend_exhausted"},
    "compensated": {"compensated"},
}


@pytest.mark.parametrize("fate", MessageFate)
def test_in_python(post: Post, fates: dict[str, UUID], fate: MessageFate) -> None:
    """Each status finds those messages, and no others."""
    page = post.app.operator.messages(MessageFilter(status=(fate,)), PageRequest())
    assert {row.id for row in page.items} == {fates[name] for name in FOUND[fate]}


def test_together(post: Post, fates: dict[str, UUID]) -> None:
    """Several statuses find what any of them finds, those of the producer's side among them."""
    undecided = _prepare(post)
    chosen = (MessageStatus.UNDECIDED, MessageFate.PARKED, MessageFate.COMPENSATED, MessageFate.CONSUMED)
    page = post.app.operator.messages(MessageFilter(status=chosen), PageRequest())
    assert {row.id for row in page.items} == {
        undecided,
        *(fates[each] for each in ("parked", "compensated", "consumed")),
    }


def _prepare(post: Post) -> UUID:
    with post.producer.begin() as connection:
        return post.app.prepare(connection, "t", "prepared", immunity=3600)


def test_by_several_groups(post: Post) -> None:
    """Consumed is what all known groups have consumed; what one of them has failed is failed, whatever the others."""
    app = post.know("g", "h")
    (half_id,) = post.send("fails")
    post.consume(post.declare())
    post.confirm(app)
    # Group h has read nothing, and isn't known to the database yet.
    assert _found(post, "consumed") == {half_id}
    post.consume(post.declare(refuse, group="h", retry_delays=()))
    post.confirm(app)
    assert (_found(post, "consumed"), _found(post, "parked")) == (set(), {half_id})


def test_what_was_before_a_group_is_not_unconsumed(post: Post) -> None:
    """A message that was never meant for the only known group is neither consumed nor missed."""
    (before,) = post.send(1)
    consumer = post.declare(start="now")
    (after,) = post.send(2)
    post.consume(consumer)
    post.confirm()
    assert (_found(post, "consumed"), _found(post, "unconsumed")) == ({after}, set())
    assert before not in post.fates()


def _found(post: Post, status: str) -> set[UUID]:
    page = post.app.operator.messages(MessageFilter(status=(MessageFate(status),)), PageRequest())
    return {row.id for row in page.items}


def test_by_the_number_of_sends(post: Post, fates: dict[str, UUID]) -> None:
    """What was sent again, so often at least, is a condition of its own."""
    again = {fates[each] for each in ("lost", "resend_exhausted", "compensated")}
    post.resend(fates["lost"])
    dispatched = {each for name, each in fates.items() if name not in {"scheduled", "committed"}}
    for sends, found in ((1, dispatched), (2, again), (3, {fates["lost"]}), (4, set())):
        page = post.app.operator.messages(MessageFilter(sends=sends), PageRequest())
        assert {row.id for row in page.items} == found


def test_by_http_and_on_the_page(post: Post, fates: dict[str, UUID]) -> None:
    """The query parameter of the API and the ticks of the page find the same; a message shows its deliveries."""
    app = FastAPI()
    app.include_router(create_console_router(post.app, authorizer=AllowAll()), prefix="/outbox")
    with TestClient(app, base_url="http://localhost") as client:
        found = client.get("/outbox/api/v1/messages", params={"status": ["parked", "consumed"]}).json()
        assert {UUID(row["id"]) for row in found["items"]} == {fates["parked"], fates["consumed"]}
        again = client.get("/outbox/api/v1/messages", params={"sends": 2, "status": "unconsumed"}).json()
        assert {UUID(row["id"]) for row in again["items"]} == {fates["lost"], fates["compensated"]}
        page = client.get("/outbox/messages", params={"status": "resend_exhausted"}).text
        assert str(fates["resend_exhausted"]) in page
        assert str(fates["parked"]) not in page
        message = client.get(f"/outbox/api/v1/messages/{fates['parked']}").json()
        assert [(each["group"], each["status"]) for each in message["deliveries"]] == [("g", "parked")]
        assert "What the producer has learnt" in client.get(f"/outbox/messages/{fates['parked']}").text


def test_with_the_command(post: Post, fates: dict[str, UUID], capsys: pytest.CaptureFixture[str]) -> None:
    """So does the option of the command."""
    url = post.producer.url.render_as_string(hide_password=False)
    with pytest.raises(SystemExit, match="0"):
        main(["messages", "list", "--status", "resend_exhausted", "--url", url, "-o", "json"])
    found = json.loads(capsys.readouterr().out)
    assert [UUID(row["id"]) for row in found["items"]] == [fates["resend_exhausted"]]
    with pytest.raises(SystemExit, match="0"):
        main(["messages", "show", str(fates["parked"]), "--url", url])
    assert "Deliveries" in capsys.readouterr().out


def test_a_bulk_job_of_them(post: Post, fates: dict[str, UUID]) -> None:
    """What a filter finds can be acted on: all that was given up is sent again."""
    operator, selector = post.app.operator, Selector(messages=MessageFilter(status=(MessageFate.RESEND_EXHAUSTED,)))
    preview = operator.preview("resend", selector)
    job = operator.start("resend", selector, by="me", why="test", token=preview.token)
    items = operator.bulk_items(job.id, BulkItemFilter(), PageRequest()).items
    assert [each.message_id for each in items] == [fates["resend_exhausted"]]
