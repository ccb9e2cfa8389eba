"""Groups in the console: the list, what holds a group back, previews, and acts that need an admin; paused topics."""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from urllib.parse import quote
from uuid import UUID

import pytest
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from outbox.acts.changes import FEW
from outbox.consumer.meter import BOUNDS
from outbox.testing import drain
from tests.console.test_pages_look import well_made
from tests.console.visitor import Visitor
from tests.console.web import GROUP, TOPIC, Http, Shop
from tests.operator.health import sample, this_minute

WHY = {"reason": "the handler was wrong"}
WHILE = {"reason": "the provider moves"}


@pytest.fixture(scope="module")
def group(shop: Shop) -> str:
    """The path of a group that has consumed three orders."""
    shop.orders(1, 2, 3)
    shop.drain()
    (row,) = shop.outbox.operator.groups()
    return f"/groups/{row.group}/{row.topic}"


def test_the_endpoints(acting: Http, group: str) -> None:
    """The groups, what a reset would do, a reset, a skip, a delete; and what there isn't."""
    (row,) = acting.get("/groups").json()["items"]
    assert (f"/groups/{row['group']}/{row['topic']}", row["lag"], row["passages"]) == (group, 0, 0)
    assert acting.get(f"{group}/reset?to=first").json()["messages"] == 3
    assert acting.get(f"{group}/reset?to=monday").status_code == 422
    assert acting.post(f"{group}/reset", {"to": "first"}).status_code == 422
    done = acting.post(f"{group}/reset", {"to": "first", **WHY})
    assert (done.status_code, "reads up to 3 messages again" in done.json()["outcome"]) == (200, True)
    assert acting.post(f"{group}/reset", {"to": "first", **WHY}).status_code == 409
    assert acting.get(f"{group}/skip").json()["messages"] == 3
    assert acting.post(f"{group}/skip", WHY).status_code == 200
    assert acting.get(f"{group}/delete").json()["inbox"] == {"consumed": 3}
    for http in (acting.as_role("viewer"), acting.as_role("operator")):
        assert http.get("/groups").status_code == 200
        for act in ("reset", "skip", "delete"):
            assert http.get(f"{group}/{act}?to=first" if act != "delete" else f"{group}/{act}").status_code == 403
            assert http.post(f"{group}/{act}", {"to": "first", **WHY} if act != "delete" else WHY).status_code == 403
    assert acting.get("/groups/none/none/delete").status_code == 404
    topic = f"/topics/{row['topic']}/delete"
    assert [name for name, _ in acting.get(topic).json()["groups"]] == [row["group"]]
    assert acting.post(topic, WHY).status_code == 409
    assert acting.as_role("operator").get(topic).status_code == 403
    assert acting.as_role("operator").post(topic, WHY).status_code == 403
    for act in ("delete", "pause", "resume"):
        assert acting.post(f"/topics/none/{act}", WHY).status_code == 404
    for act, more in (("pause", {"create": True}), ("resume", {})):
        assert acting.post(f"/topics/none/{act}", {**more, **WHY}).status_code == 200
    assert acting.post(f"{group}/delete", WHY).status_code == 200
    assert acting.get("/groups").json()["items"] == []


def test_the_pages(acting: Http, shop: Shop) -> None:
    """The list; the question, first where the group goes on, then with the counts; and what was done.

    The group was deleted before: it came back, and began anew.
    """
    shop.orders(1, 2)
    shop.drain()
    visitor = Visitor(acting).as_role("admin")
    (row,) = shop.outbox.operator.groups()
    where = f"group={row.group}&topic={row.topic}"
    assert "Reset…" not in visitor.as_role("operator").go("groups").text
    assert visitor.as_role("operator").go(f"acts/reset_group?{where}").status == 403
    page = visitor.go("groups")
    well_made(page)
    page = visitor.go(page.link("Reset…"))
    well_made(page)
    # What the first moment would do is there at once; of few messages no name has to be typed.
    assert ("Messages 5" in page.text, "To yesterday" in page.text, " to go on" in page.text) == (True, True, False)
    assert "Messages 5" in visitor.go(page.link("the beginning")).text
    picked = visitor.go(f"acts/reset_group?{where}&to=first&moment=2020-01-01T12:00")
    assert "To 2020-01-01T12:00Z" in picked.text
    bare = visitor.go(f"acts/reset_group?{where}")
    bare = visitor.send(bare.form("/reset_group"), to="monday")
    assert (bare.status, "must be 'first' or 'now'" in bare.text) == (422, True)
    unsaid = visitor.send(page.form("/reset_group"))
    assert (unsaid.status, "Messages 5" in unsaid.text) == (422, True)
    page = visitor.send(unsaid.form("/reset_group"), reason="the handler was wrong")
    assert "Reset: the group reads on from there." in page.text
    assert "moved 1 time" in page.text
    page = visitor.go(f"acts/skip_group?{where}&to=now")
    page = visitor.send(page.form("/skip_group"), reason="none of it is needed")
    assert "Skipped: the group reads on from there." in page.text
    assert "There is nothing to do" in visitor.go(f"acts/skip_group?{where}&to=now").text
    page = visitor.go(f"acts/delete_group?{where}")
    well_made(page)
    page = visitor.send(page.form("/delete_group"), reason="it is gone")
    assert "No group has read anything" in page.text


def test_what_reaches_many_has_its_name_typed(acting: Http, shop: Shop) -> None:
    """A reset over more than 100 messages asks for the group's name; without it nothing is done."""
    shop.orders(*range(FEW + 1))
    shop.drain()
    visitor = Visitor(acting).as_role("admin")
    (row,) = (each for each in shop.outbox.operator.groups() if each.topic == TOPIC)
    page = visitor.go(visitor.go("groups").link("Reset…"))
    untyped = visitor.send(page.form("/reset_group"), reason="the handler was wrong")
    assert (untyped.status, f"type {row.group!r}" in untyped.text) == (422, True)
    (still,) = (each for each in shop.outbox.operator.groups() if each.topic == TOPIC)
    assert still.passages == row.passages
    page = visitor.send(untyped.form("/reset_group"), reason="the handler was wrong", typed=row.group)
    assert "Reset: the group reads on from there." in page.text
    shop.drain()
    page = visitor.go(f"acts/delete_group?group={row.group}&topic={row.topic}")
    visitor.send(page.form("/delete_group"), reason="it begins anew", typed=row.group)


def test_the_owner_stands_beside_the_group(acting: Http, shop: Shop) -> None:
    """The one that the newest note about its dead letters names."""
    shop.parked(1)
    (dead,) = acting.get("/dead/groups").json()
    for owner in ("sales", "payments"):
        acting.post(f"/dead/groups/{dead['fingerprint']}/note", {"owner": owner})
    (row,) = (each for each in acting.get("/groups").json()["items"] if each["topic"] == dead["topic"])
    assert row["owner"] == "payments"
    assert "payments" in Visitor(acting).go("groups").text


def test_a_topic_with_slashes_and_dots(acting: Http, visitor: Visitor, shop: Shop) -> None:
    """Whatever name a topic may have, each endpoint and each page of its groups takes it."""
    topic = "order/paid.v2"
    path = f"groups/billing/{quote(topic, safe='')}"
    handled: list[UUID] = []
    other = Outbox(shop.engine, group="other")

    @other.consumer(topic, group="billing")
    def bill(message: Message, _: Session) -> None:
        handled.append(message.id)

    sent = shop.order(1, send={"topic": topic})
    drain(other)
    assert handled == [sent]
    assert acting.get(f"/{path}/reset?to=first").json()["messages"] == 1
    for act, more in (("reset", {"to": "first"}), ("skip", {}), ("delete", {})):
        done = acting.post(f"/{path}/{act}", {**more, **WHY})
        assert done.status_code == 200, done.text
    for act in ("pause", "resume"):
        assert acting.post(f"/topics/{quote(topic, safe='')}/{act}", WHILE).status_code == 200
    assert acting.get(f"/topics/{quote(topic, safe='')}/delete").json()["topic"] == topic
    drain(other)
    for act in ("reset_group", "skip_group", "delete_group", "pause_group", "set_rate", "delete_topic"):
        page = visitor.go(f"acts/{act}?group=billing&topic={quote(topic, safe='')}")
        assert (page.status, topic in page.text) == (200, True)
    assert acting.post(f"/{path}/delete", WHY).status_code == 200


def test_the_endpoints_of_what_holds_back(acting: Http, shop: Shop) -> None:
    """The list, the three acts, and what is refused; an operator may, a viewer may not."""
    shop.order(1)
    shop.drain()
    (row,) = (each for each in acting.get("/groups").json()["items"] if each["group"] == "billing")
    assert (row["topic"], row["state"], row["rate"]) == ("orders", "unattended", None)
    assert acting.as_role("viewer").post("/groups/billing/pause", WHILE).status_code == 403
    assert acting.post("/groups/billing/pause", {}).status_code == 422
    paused = acting.as_role("operator").post("/groups/billing/pause", WHILE)
    assert (paused.status_code, "is paused" in paused.json()["outcome"]) == (200, True)
    assert acting.post("/groups/billing/pause", WHILE).status_code == 409
    assert acting.post("/groups/billing/rate", {"rate": "fast"}).status_code == 422
    assert acting.post("/groups/billing/rate", {"rate": "5/s"}).status_code == 200
    (row,) = (each for each in acting.get("/groups").json()["items"] if each["group"] == "billing")
    assert (row["state"], row["rate"], row["pause_reason"]) == ("paused", 5.0, "the provider moves")
    assert acting.post("/groups/billing/resume", {"topic": "elsewhere"}).status_code == 404
    assert acting.post("/groups/billing/resume", {}).status_code == 200
    assert acting.post("/groups/billing/rate", {"rate": None}).status_code == 200
    actions = [each["action"] for each in acting.get("/audit").json()["items"]]
    assert actions[:4] == ["set_rate", "resume_group", "set_rate", "pause_group"]


def test_a_topic_is_paused(visitor: Visitor, shop: Shop) -> None:
    """By forms; what it holds is shown as held, in both lists, and goes out when it is resumed."""
    form = visitor.go(visitor.go("groups").link("Pause a topic…")).form("/pause_topic")
    page = visitor.send(form, "create", topic="orders", **WHILE)
    assert "Paused: its new messages are held" in page.text
    well_made(page)
    held = shop.order(1)
    shop.drain()
    for address in ("messages", "scheduled"):
        assert "held: its topic is paused" in visitor.go(address).text
    assert "held" in visitor.go(f"messages/{held}").text
    resumed = visitor.send(visitor.go(visitor.go("groups").link("Resume it…")).form("/resume_topic"))
    assert "Resumed: held messages go out" in resumed.text
    shop.drain()
    assert "No topic is paused" in visitor.go("groups").text


def test_what_is_wrong_is_asked_for_again(visitor: Visitor) -> None:
    """A topic that isn't there, a field too many: the form comes back with what was typed, and says why."""
    form = visitor.go("acts/pause_topic").form("/pause_topic")
    wrong = visitor.send(form, topic="ordres", reason="they come twice")
    assert (wrong.status, "no topic 'ordres'" in wrong.text, "they come twice" in wrong.text) == (404, True, True)
    assert "Paused" in visitor.send(wrong.form("/pause_topic"), "create").text
    assert visitor.go("groups?" + "&".join(f"a{n}=1" for n in range(201))).status == 422
    assert visitor.go("acts/reset_group?group=none&topic=none&to=99999999999d").status == 404


def test_a_group_is_held_back(visitor: Visitor, shop: Shop) -> None:
    """A group is paused, slowed down and resumed by forms; a rate that is none is said, and kept in the form."""
    shop.order(1)
    shop.drain()
    page = visitor.go("groups")
    well_made(page)
    asked = visitor.go(page.link("Pause…"))
    assert "begin no message of this group" in asked.text
    paused = visitor.send(asked.form("/pause_group"), reason="the provider moves")
    assert "Paused" in paused.text
    assert "the provider moves" in paused.text
    asked = visitor.go(visitor.go("groups").link("Set the rate…"))
    wrong = visitor.send(asked.form("/set_rate"), rate="fast")
    assert (wrong.status, "'100/s'" in wrong.text) == (422, True)
    assert "5/s" in visitor.send(wrong.form("/set_rate"), rate="5/s").text
    resumed = visitor.send(visitor.go(visitor.go("groups").link("Resume…")).form("/resume_group"))
    assert "Resumed" in resumed.text
    assert shop.outbox.operator.control_of("billing", "orders").state == "running"


def test_what_a_group_did_minute_by_minute(acting: Http, visitor: Visitor, shop: Shop) -> None:
    """A minute's column leads to its messages; where no sample is, the chart has a gap, and the table a dash."""
    minute = this_minute(shop.engine) - dt.timedelta(minutes=5)
    done = {"done": 40.0, "failed": 2.0, "calls": {str(bisect_left(BOUNDS, 0.02)): 42}}
    sample(shop.engine, minute, {}, work={TOPIC: {GROUP: done}, "a/b": {GROUP: done}})
    found = {each["name"]: each for each in acting.get(f"/groups/{GROUP}/{TOPIC}/work").json()}
    at = [dt.datetime.fromisoformat(each) for each in found["p50"]["times"]].index(minute)
    assert [found[name]["values"][at] for name in ("consumed", "failed")] == [40.0, 2.0]
    assert found["p95"]["values"][at] == pytest.approx(0.02, rel=0.25)
    assert found["p95"]["values"][at + 1] is None
    assert acting.get(f"/groups/{GROUP}/{TOPIC}/work?window=2y").status_code == 422
    assert acting.get(f"/groups/{GROUP}/{TOPIC}/work?database=nowhere").status_code == 422
    page = visitor.go(f"/groups/{GROUP}/{TOPIC}")
    well_made(page)
    since, until = (quote(f"{each:%Y-%m-%dT%H:%MZ}") for each in (minute - dt.timedelta(minutes=1), minute))
    leads = f"/inbox?group={GROUP}&topic={TOPIC}&since={since}&until={until}"
    # In each of the two charts from the column, and from the table, which a keyboard reaches.
    assert [tag.get("href") for name, tag in page.tags if name == "a"].count(leads) == 4
    assert "consumed: unknown" in page.text and "consumed: 40 messages/min" in page.text
    assert visitor.go(f"/groups/{GROUP}/{TOPIC}?window=2y").status == 422
    # Of a longer window a column is one minute of its step, too: that of a later sample is no part of it.
    hour = dt.datetime.fromtimestamp(int(minute.timestamp()) // 7200 * 7200 - 7200, dt.UTC)
    for moment, count in ((hour, 30.0), (hour - dt.timedelta(minutes=119), 20.0)):
        sample(shop.engine, moment, {}, work={TOPIC: {GROUP: done | {"done": count}}})
    page = visitor.go(f"/groups/{GROUP}/{TOPIC}?window=7d")
    since, until = (quote(f"{each:%Y-%m-%dT%H:%MZ}") for each in (hour - dt.timedelta(minutes=1), hour))
    assert f"since={since}&until={until}" in {str(tag.get("href")).partition(f"{TOPIC}&")[2] for _, tag in page.tags}
    assert ("consumed: 30 messages/min" in page.text, "consumed: 20 messages/min" in page.text) == (True, False)
    # A topic may have a slash in its name.
    assert visitor.go(f"/groups/{GROUP}/a%2Fb").status == 200
    assert len(acting.get(f"/groups/{GROUP}/a%2Fb/work").json()) == 4
    statuses = {visitor.go(f"/groups/{GROUP}/nope").status, acting.get(f"/groups/{GROUP}/nope/work").status_code}
    assert statuses == {404}
