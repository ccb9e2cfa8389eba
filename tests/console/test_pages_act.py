"""Acting by the pages alone, as a browser without scripts does: asked first, done, told, and on record."""

from __future__ import annotations

import datetime as dt
import re
from urllib.parse import quote
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from outbox.acts.changes import Act
from outbox.acts.messages import ACTS
from outbox.dispatch.dispatch_pass import dispatch_lock
from outbox.testing import bulk
from tests.console.test_pages_look import well_made
from tests.console.visitor import Page, Visitor
from tests.console.web import GROUP, TOPIC, Shop
from tests.kit import wait_until

WHY = "the customer called"


def status(shop: Shop, message: UUID) -> str:
    """The status of a message in the billing's inbox."""
    query = text("SELECT status || CASE WHEN discarded_at IS NULL THEN '' ELSE ', discarded' END"
                 " FROM outbox.consumer_message WHERE message_id = :id")  # fmt: skip
    with shop.engine.connect() as connection:
        return str(connection.execute(query, {"id": message}).scalar())


def on_record(visitor: Visitor, message: UUID, action: str) -> list[str]:
    """The audit's rows about an action on a message."""
    return visitor.go(f"audit?action={action}&target={message}").rows


def ask(visitor: Visitor, message: UUID, label: str) -> Page:
    """Open the question before an action from the message's page."""
    return visitor.go(visitor.go(f"messages/{message}").link(label))


def test_a_dead_letter_is_retried(visitor: Visitor, shop: Shop) -> None:
    """From its group as a trial: what would happen is said, it is done, told once, and in the audit."""
    (message,) = shop.parked(1, trouble="no such street")
    dead = visitor.go("dead")
    asked = visitor.go(dead.link("Retry one as a trial"))
    assert "Retry in billing?" in asked.text
    assert "all of its attempts again" in asked.text
    assert asked.has_link("Cancel")
    page = visitor.send(asked.form("/do/retry"), reason=WHY)
    assert "It will be tried again as soon as a worker comes to it." in page.text
    assert visitor.at == f"/messages/{message}?did=retry"
    assert status(shop, message) == "failed"
    (row,) = on_record(visitor, message, "retry")
    assert "ada" in row
    assert WHY in row
    assert "console" in row


def test_discarded_and_restored(visitor: Visitor, shop: Shop) -> None:
    """It leaves the dead letters for the other tab, from where it comes back."""
    (message,) = shop.parked(2, trouble="wrong colour")
    visitor.send(ask(visitor, message, "Discard in billing").form("/do/discard"), reason=WHY)
    assert status(shop, message) == "parked, discarded"
    assert "wrong colour" not in visitor.go("dead").text
    tab = visitor.go("dead?tab=discarded")
    assert any("wrong colour" in row for row in tab.rows)
    visitor.send(ask(visitor, message, "Restore in billing").form("/do/restore"))
    assert status(shop, message) == "parked"
    assert "wrong colour" in visitor.go("dead").text


def test_a_reason_is_asked_for_where_it_is_needed(visitor: Visitor, shop: Shop) -> None:
    """The browser asks for it; without one the server says what is missing, and nothing is done."""
    (message,) = shop.parked(3)
    asked = ask(visitor, message, "Discard in billing")
    (reason,) = [values for name, values in asked.tags if name == "textarea"]
    assert "required" in reason
    page = visitor.send(asked.form("/do/discard"), reason=" ")
    assert page.status == 422
    assert "Give a reason" in page.text
    assert status(shop, message) == "parked"


def test_what_has_changed_meanwhile_is_looked_at_again(visitor: Visitor, shop: Shop) -> None:
    """The question knows which state it was asked in; if that has passed, nothing is done."""
    (message,) = shop.parked(4)
    asked = ask(visitor, message, "Discard in billing")
    shop.outbox.operator.retry(message, group=GROUP, by="otto", why="faster")
    page = visitor.send(asked.form("/do/discard"), reason=WHY)
    assert page.status == 412
    assert "has changed since you looked at it" in page.text
    assert "failed" in visitor.go(page.link("Back to it")).text
    assert on_record(visitor, message, "discard") == []


def test_an_act_that_is_not_possible_is_explained(visitor: Visitor, shop: Shop) -> None:
    """By the question, which then has no button; and by the answer, if it is sent nevertheless."""
    message = shop.order(5)
    shop.drain()
    asked = visitor.go(f"messages/{message}/do/retry?group={GROUP}")
    assert "This can\N{RIGHT SINGLE QUOTATION MARK}t be done: it is consumed" in asked.text
    assert not [form for form in asked.forms if form.buttons and form.action.endswith("/do/retry")]
    page = Page(visitor.http.ask("POST", f"/messages/{message}/do/retry", data={"group": GROUP}))
    assert page.status == 409
    assert "There is nothing to retry" in page.text or "there is nothing to retry" in page.text


@pytest.mark.parametrize("act", ACTS.values(), ids=lambda act: act.name)
def test_every_act_of_the_table_has_its_question(visitor: Visitor, shop: Shop, act: Act) -> None:
    """With its label, and either its consequence or why it can't be done."""
    message = shop.half(5) if act.noun == "half" else shop.parked(5)[0]
    group = f"?group={GROUP}" if act.noun == "inbox" else ""
    asked = visitor.go(f"messages/{message}/do/{act.name}{group}")
    assert asked.status == 200
    assert f"{act.label} " in asked.text or f"{act.label}?" in asked.text
    assert (act.consequence in asked.text) != ("This can\N{RIGHT SINGLE QUOTATION MARK}t be done:" in asked.text)


def test_a_fence_is_overruled_only_knowingly(visitor: Visitor, shop: Shop) -> None:
    """Committing a half whose change was never made needs a box to be ticked that says so."""
    half = shop.half(9)
    with shop.engine.begin() as connection:
        connection.execute(text("UPDATE outbox.half_check SET fenced = true WHERE half_id = :id"), {"id": half})
    asked = ask(visitor, half, "Commit…")
    assert "a change that was never made" in asked.text
    form = asked.form("/do/commit")
    assert visitor.send(form, reason=WHY).status == 409
    assert "Committed" in visitor.send(form, "force", reason=WHY).text


def test_a_scheduled_message_is_recalled(visitor: Visitor, shop: Shop) -> None:
    """From its page; then it stands among the recalled ones, with who did it."""
    message = shop.order(10, send={"delay": 3600})
    shop.drain()
    assert any(str(message)[-8:] in row for row in visitor.go("scheduled").rows)
    visitor.send(ask(visitor, message, "Recall…").form("/do/recall"), reason=WHY)
    assert not any(str(message)[-8:] in row for row in visitor.go("scheduled").rows)
    (row,) = [row for row in visitor.go("scheduled?recalled=yes").rows if str(message)[-8:] in row]
    assert "ada" in row


def test_a_body_is_revealed_by_who_may_on_record(visitor: Visitor, shop: Shop) -> None:
    """Masked for all; revealed by a POST, which stands in the audit; refused to an operator."""
    message = shop.order(12, **{"password": "swordfish"})
    page = visitor.go(f"messages/{message}")
    assert "swordfish" not in page.text
    assert "Masked: password." in page.text
    shown = visitor.send(page.form("/reveal"))
    assert "swordfish" in shown.text
    assert len(on_record(visitor, message, "reveal")) == 1
    assert "swordfish" not in visitor.go(f"messages/{message}").text
    operator = visitor.as_role("operator")
    assert not [form for form in operator.go(f"messages/{message}").forms if "reveal" in form.action]
    assert operator.http.ask("POST", f"/messages/{message}/reveal").status_code == 403
    assert visitor.http.ask("GET", f"/messages/{message}/reveal").status_code in {404, 405}


def test_a_local_transaction_is_rolled_back(visitor: Visitor, shop: Shop) -> None:
    """What the groups did is said first; the key has to be typed; a worker does it, once; the message tells of it."""
    undone: list[str | None] = []
    if TOPIC not in shop.outbox.compensations:
        shop.outbox.compensation(TOPIC, consumers=[])(lambda message, session: undone.append(message.key))
    (message,) = shop.parked(13)
    asked = ask(visitor, message, "Compensate…")
    assert "It took effect in none of the groups that are known." in asked.text
    assert "No living worker has a compensation for this topic." in asked.text
    form = asked.form("/do/compensate")
    again = visitor.send(form, reason=WHY, typed="order-14")
    assert again.status == 422
    assert "to go on, type 'order-13'" in again.text
    assert WHY in again.text
    page = visitor.send(again.form("/do/compensate"), typed="order-13")
    assert "Ordered: a worker compensates the local transaction." in page.text
    assert "0 of 1" in page.text
    bulk(shop.outbox)
    assert undone == ["order-13"]
    assert "1 of 1" in visitor.go(visitor.at).text
    assert status(shop, message) == "quarantined"
    told = visitor.go(f"messages/{message}")
    assert re.search(rf"Compensated on .* As ordered by ada: {WHY}", told.text)
    assert not told.has_link("Compensate…")


def test_a_rollback_of_what_took_effect_is_acknowledged(visitor: Visitor, shop: Shop) -> None:
    """The question names the groups in which it took effect; without the box the bulk job skips it."""
    message = shop.order(14)
    shop.drain()
    asked = ask(visitor, message, "Compensate…")
    assert "It took effect already in billing." in asked.text
    (box,) = [values for name, values in asked.tags if values.get("name") == "acknowledge_delivered"]
    assert "required" in box


def test_what_was_done_is_told_by_a_code_only(visitor: Visitor) -> None:
    """A link can't put words into the console's mouth."""
    assert "flash" not in [values.get("id") for _, values in visitor.go("messages?did=You+won").tags]
    assert "You won" not in visitor.go("messages?did=You+won").text


def test_the_holder_of_a_lock_is_ended(visitor: Visitor, shop: Shop) -> None:
    """The page of locks names who holds one; the question says what it will do, and the audit who did it."""
    with shop.engine.connect() as holder:
        holder.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": dispatch_lock("outbox")})
        page = visitor.go("locks")
        assert sum("dispatch" in row for row in page.rows) == 1
        asked = visitor.go(page.link("End…"))
        assert "its transaction rolls back" in asked.text
        (session,) = (value for name, value in asked.form("/end").fields if name == "session")
        told = visitor.send(asked.form("/end"), reason=WHY, typed=session)
        assert "Ended: what its transaction did is rolled back" in told.text
        # PostgreSQL ends the session in its own time.
        wait_until(lambda: "No lock is held" in visitor.go("locks").text, "the session has ended")
        assert visitor.send(asked.form("/end"), reason=WHY).status == 409
        with pytest.raises(DBAPIError):
            holder.execute(text("SELECT true"))
    assert WHY in " ".join(visitor.go("audit?action=end").rows)


def test_a_copy_with_another_body_is_sent(visitor: Visitor, shop: Shop) -> None:
    """The body is shown unmasked, on record; a wrong one is shown again; copy and original lead to each other."""
    (message,) = shop.parked(15, trouble="no such street")
    asked = visitor.send(visitor.go(f"messages/{message}").form("/edit/ask"))
    assert len(on_record(visitor, message, "reveal")) == 1
    assert '"no such street"' in asked.text
    assert "is quarantined in every group" in asked.text
    again = visitor.send(asked.form("/edit"), body='{"number": <15>', reason=WHY)
    assert again.status == 422
    assert "The body isn't JSON" in again.text
    assert '{"number": <15>' in again.text
    page = visitor.send(again.form("/edit"), body='{"number": 15, "street": "Main"}', reason=WHY)
    assert "Sent: this is the copy" in page.text
    assert page.has_link(str(message)[-8:])
    copy = UUID(visitor.at.partition("?")[0].rpartition("/")[2])
    shop.drain()
    assert (status(shop, message), status(shop, copy)) == ("quarantined", "consumed")
    original = visitor.go(f"messages/{message}")
    assert original.has_link(str(copy)[-8:])
    (row,) = on_record(visitor, message, "edit")
    assert WHY in row
    assert "Main" in row
    asked = visitor.send(original.form("/edit/ask"))
    assert "It has a copy already:" in asked.text


def test_who_may_not_edit_is_not_asked(visitor: Visitor, shop: Shop) -> None:
    """An operator and a viewer see no form, and are refused; a link does nothing."""
    (message,) = shop.parked(16)
    for role in ("operator", "viewer"):
        other = visitor.as_role(role)
        assert not [form for form in other.go(f"messages/{message}").forms if "/edit" in form.action]
        for path in ("edit", "edit/ask"):
            assert other.http.ask("POST", f"/acts/{path}", data={"message_id": str(message)}).status_code == 403
        assert other.http.post(f"/messages/{message}/edit", {"body": "{}", "reason": WHY}).status_code == 403
    for path in ("edit", "edit/ask"):
        assert visitor.http.ask("GET", f"/acts/{path}", params={"message_id": str(message)}).status_code in {404, 405}
    assert status(shop, message) == "parked"
    assert not on_record(visitor, message, "reveal")


def test_a_note_is_written_beside_dead_letters(visitor: Visitor, shop: Shop) -> None:
    """By operators, as text and nothing else; a viewer is offered none, and refused."""
    (message,) = shop.parked(17, trouble="no such lane")
    found = visitor.http.get("/dead/groups").json()
    fingerprint = next(each["fingerprint"] for each in found if each["sample"]["message_id"] == str(message))
    page = visitor.as_role("operator")
    asked = page.go(f"acts/note?fingerprint={fingerprint}")
    told = page.send(asked.form("/note"), note="<b>call ann</b>", owner="payments")
    assert "Noted." in told.text
    assert "<b>call ann</b>" in told.text
    assert "Parked in each of the last 24 hours" in told.text
    viewer = visitor.as_role("viewer")
    assert viewer.http.ask("POST", "/acts/note").status_code == 403
    assert viewer.http.post(f"/dead/groups/{fingerprint}/note", {"note": "x"}).status_code == 403
    assert visitor.http.post(f"/dead/groups/{fingerprint}/note", {"note": "by the API"}).status_code == 200
    noted = next(each for each in visitor.http.get("/dead/groups").json() if each["fingerprint"] == fingerprint)
    assert (noted["note"], noted["owner"]) == ("by the API", None)
    assert visitor.http.post("/dead/groups/0123456789abcdef/note", {"note": "x"}).status_code == 404


def test_silences_that_hold_and_that_are_planned(visitor: Visitor, shop: Shop) -> None:
    """Both are on a page; there a silence is lifted, a planned one by itself, and the page tells how many were."""
    operator = shop.outbox.operator
    tomorrow = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    operator.silence("message.parked", 3600, by="ann", why="the provider moves", topic=TOPIC)
    operator.silence("message.parked", 3600, by="ann", why="the provider moves", group=GROUP)
    operator.silence("group.lag", 3600, by="bob", why="the yearly import", begins=tomorrow)
    page = visitor.go("silences")
    well_made(page)
    first, second, planned = page.rows[1:]
    assert all("silenced" in row and "message.parked" in row for row in (first, second))
    assert all(word in planned for word in ("planned", "group.lag", "bob", "the yearly import", "all that it finds"))
    links = [href for href, words in page.links if words == "Lift the silence…"]
    assert len(links) == 3
    done = visitor.send(visitor.go(links[2]).form("/acts/lift_silence"))
    assert done.status == 200 and "needs attention again. Count: 1." in done.text
    assert len(done.rows) == 3
    done = visitor.send(visitor.go("acts/lift_silence?rule=message.parked").form("/acts/lift_silence"))
    assert "Count: 2." in done.text and "No rule is silenced" in done.text
    for did in ("nothing-2", "lift_silence-<b>", "lift_silence-12345678901"):
        assert "Count" not in visitor.go(f"silences?did={quote(did)}").text


def test_a_filter_is_saved_and_deleted(visitor: Visitor, shop: Shop) -> None:
    """Once something is searched for, it can be kept under a name; a period stays one. Another user doesn't see it."""
    shop.orders(1)
    assert "Save this filter" not in visitor.go("messages").text
    page = visitor.go(f"messages?topic={TOPIC}&within=24h")
    saved = visitor.send(visitor.go(page.link("Save this filter")).form("/acts/save_filter"), filter="of today")
    well_made(saved)
    assert "Saved." in saved.text
    leads = saved.link("of today")
    assert leads == f"/messages?topic={TOPIC}&within=24h"
    assert "24 hours" in visitor.go(leads).text
    assert not visitor.go("inbox").has_link("of today")
    assert not visitor.as_role("operator").go("messages").has_link("of today")
    question = next(href for href, _ in saved.links if "delete_filter" in href)
    gone = visitor.send(visitor.go(question).form("/acts/delete_filter"))
    assert "Deleted." in gone.text and not gone.has_link("of today")


def test_names_are_suggested(visitor: Visitor, shop: Shop) -> None:
    """Keys of the newest messages, and the errors of dead letters, as far as they are in the error."""
    shop.parked(7, trouble="no lane 17 in town")
    options = {values.get("value") for name, values in visitor.go("messages").tags if name == "option"}
    assert {TOPIC, "order-7"} <= options
    page = visitor.go("inbox")
    assert "no lane" in {values.get("value") for name, values in page.tags if name == "option"}
    assert "no lane 17" in visitor.go("inbox?error=no%20lane").text
    shop.parked(8, trouble="no way to db.hidden.example:5432/shop")
    for role in ("admin", "viewer"):  # as far as both of them can search by it
        page = visitor.as_role(role).go("inbox")
        assert "no way to" in {values.get("value") for name, values in page.tags if name == "option"}
