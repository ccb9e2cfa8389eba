"""Acts and lists by every way in: what Python's call does, says and finds, endpoint, page and command do, too.

From which states an act can be done, what it leaves behind, and what a filter means, is tested at the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import pytest

from outbox.acts.changes import Act
from outbox.acts.messages import ACTS
from outbox.cli.options import _option
from outbox.cli.output import Code
from outbox.console.api.lists import types_of
from outbox.console.pages.lists import read
from outbox.embedded import ServerLike
from outbox.errors import ActRefused
from outbox.message.model import uuid7
from outbox.operator.model import PageRequest
from outbox.reader import plain, shape_of
from tests.cli.conftest import Result, run_cli
from tests.console.visitor import Form, Page, Visitor
from tests.console.web import Http
from tests.operator.acting import Desk, open_desk
from tests.operator.test_acts import DONE, HALF_STATES, INBOX_STATES, state_of

WHY = "the customer called"
GROUP = "bank-b"
#: A state from which each act can be done, and one from which none can.
FIT = dict(reversed(DONE))
UNFIT = {"message": "recalled", "half": "recalled", "inbox": "quarantined"}
EACH = pytest.mark.parametrize("act", [each for each in ACTS.values() if not each.as_job], ids=lambda act: act.name)


@dataclass
class Ways:
    """A desk, and the ways in to it: a console, asked by a program and by a visitor, and the command line."""

    desk: Desk
    http: Http

    def message(self, act: Act, state: str) -> UUID:
        """Return a message in a state, at its producer or in the inbox of a group."""
        return self.desk.inbox(state)[0] if act.noun == "inbox" else self.desk.half(state)

    def python(self, act: Act, message_id: UUID) -> str:
        """Do an act by the operator's call."""
        return self.desk.act(act.name, message_id, _group(act), why=WHY)

    def api(self, act: Act, message_id: UUID, reason: str = WHY, role: str = "admin") -> tuple[int, Any]:
        """Do an act by its endpoint; return the status and what is answered."""
        below = f"inbox/{GROUP}" if act.noun == "inbox" else "messages"
        answer = self.http.as_role(role).post(f"/{below}/{message_id}/{act.name}", {"reason": reason})
        return answer.status_code, answer.json()

    def page(self, act: Act, message_id: UUID, reason: str = WHY, role: str = "admin") -> Page:
        """Do an act by the form of its page."""
        fields = [("reason", reason), *([("group", GROUP)] if act.noun == "inbox" else [])]
        return Visitor(self.http.as_role(role)).send(
            Form(f"/messages/{message_id}/do/{act.name}", "post", None, fields)
        )

    def command(self, act: Act, message_id: UUID, reason: str = WHY) -> Result:
        """Do an act by its command."""
        is_dead = bool(act.from_states & {"parked", "discarded"})
        noun = {"message": "messages", "half": "half", "inbox": "dead" if is_dead else "inbox"}[act.noun]
        target = f"{GROUP}/{message_id}" if act.noun == "inbox" else str(message_id)
        url = self.desk.engine.url.render_as_string(hide_password=False)
        words = ("--reason", reason, "--actor", "ann", "--yes", "-o", "json", "--url", url)
        return run_cli(noun, act.name, target, *words)

    def left(self, act: Act, message_id: UUID) -> Any:
        """Return what the database has of a message now, and who did what to it, and why."""
        target = f"{GROUP}/{message_id}" if act.noun == "inbox" else message_id
        audited = [row[:3] for row in self.desk.audited(target)]
        return self.desk.inbox_row(message_id) if act.noun == "inbox" else state_of(self.desk, message_id), audited


def _group(act: Act) -> str | None:
    return GROUP if act.noun == "inbox" else None


@pytest.fixture(scope="module")
def ways(server: ServerLike, template: str, make_console: Callable[..., Http]) -> Iterator[Ways]:
    """A desk over one database, and the ways in to it."""
    with open_desk(server, template, "bank") as desk, pytest.MonkeyPatch.context() as patch:
        for name in ("OUTBOX_APP", "OUTBOX_DATABASE_URL", "OUTBOX_CONSOLE_DATABASES", "OUTBOX_SCHEMA"):
            patch.delenv(name, raising=False)
        yield Ways(desk, make_console({"bank": desk.engine}))


@EACH
def test_it_is_done(ways: Ways, act: Act) -> None:
    """The same change, the same sentence, and the audit has the actor of that way, with the reason."""
    model, by_api, by_page, by_command = (ways.message(act, FIT[act.name]) for _ in range(4))
    sentence = ways.python(act, model)
    state, audited = ways.left(act, model)
    assert audited == [("ann", act.name, WHY)]
    assert ways.api(act, by_api) == (200, {"outcome": sentence.replace(str(model), str(by_api))})
    assert ways.left(act, by_api) == (state, [("ada", act.name, WHY)])
    page = ways.page(act, by_page)
    assert (page.status, act.happened in page.text) == (200, True), page.text
    assert ways.left(act, by_page) == (state, [("ada", act.name, WHY)])
    result, told = ways.command(act, by_command), sentence.replace(str(model), str(by_command))
    assert (result.code, result.err) == (0, told + "\n")
    done = {"action": act.name, "message_id": str(by_command), "group": _group(act), "outcome": told}
    assert result.json == done
    assert ways.left(act, by_command) == (state, [("ann", act.name, WHY)])


@EACH
def test_it_is_refused(ways: Ways, act: Act) -> None:
    """In a state that doesn't allow it: a conflict, with the operator's sentence; nothing changes."""
    message_id = ways.message(act, UNFIT[act.noun])
    before = ways.left(act, message_id)
    with pytest.raises(ActRefused) as refused:
        ways.python(act, message_id)
    sentence = str(refused.value)
    status, answer = ways.api(act, message_id)
    assert (status, answer["type"], answer["detail"]) == (409, "urn:outbox:problem:state-conflict", sentence)
    page = ways.page(act, message_id)
    assert (page.status, sentence.partition(" ")[2] in page.text) == (409, True), page.text
    result = ways.command(act, message_id)
    assert (result.code, result.out, result.err) == (Code.CONFLICT, "", f"error: {sentence}\n")
    assert ways.left(act, message_id) == before


@EACH
def test_a_message_that_nobody_knows(ways: Ways, act: Act) -> None:
    """It isn't found."""
    message_id = uuid7()
    status, answer = ways.api(act, message_id)
    assert (status, answer["type"]) == (404, "urn:outbox:problem:not-found")
    assert ways.page(act, message_id).status == 404
    result = ways.command(act, message_id)
    assert (result.code, result.out) == (Code.NOT_FOUND, "")
    assert result.err.startswith("error: no registered database ")


@pytest.mark.parametrize("act", [each for each in ACTS.values() if each.needs_reason and not each.as_job],
                         ids=lambda act: act.name)  # fmt: skip
def test_it_needs_a_reason(ways: Ways, act: Act) -> None:
    """Without one, the field is named and nothing is done."""
    message_id = ways.message(act, FIT[act.name])
    before = ways.left(act, message_id)
    status, answer = ways.api(act, message_id, " ")
    assert (status, [each["field"] for each in answer["errors"]]) == (422, ["reason"])
    assert ways.page(act, message_id, " ").status == 422
    result = ways.command(act, message_id, " ")
    assert (result.code, result.out) == (Code.USAGE, "")
    assert result.err == f"error: give --reason: the audit must tell why ({act.name})\n"
    assert ways.left(act, message_id) == before


@pytest.mark.parametrize("act", ACTS.values(), ids=lambda act: act.name)
def test_it_needs_its_permission(ways: Ways, act: Act) -> None:
    """The role below that of the act is neither asked nor does it; the permission that is missing is named."""
    message_id = ways.message(act, FIT.get(act.name, "dispatched"))
    before, below = ways.left(act, message_id), "operator" if act.role == "admin" else "viewer"
    status, answer = ways.api(act, message_id, role=below)
    assert (status, repr(act.permission) in answer["detail"]) == (403, True)
    asked = Visitor(ways.http.as_role(below)).go(f"messages/{message_id}/do/{act.name}?group={GROUP}")
    for page in (asked, ways.page(act, message_id, role=below)):
        assert (page.status, act.permission in page.text) == (403, True)
    assert ways.left(act, message_id) == before


# --- lists -----------------------------------------------------------------------------------------------------------

#: For each list: its command, and a text for each field of its filter.
FILTERS: dict[str, tuple[str, dict[str, str]]] = {
    "messages": (
        "messages list",
        {
            "database": "bank", "status": "scheduled", "topic": "orders", "key": "k", "tag": "t", "sends": "2",
            "producer_group": "default", "group": GROUP, "since": "2001-01-01T00:00:00+00:00",
            "until": "2001-01-01T00:00:00+00:00", "header": "h=x", "body": "n=1",
        },
    ),
    "halves": ("half list", {"database": "bank", "topic": "transfers", "status": "immune", "min_age": "1h"}),
    "scheduled": ("messages scheduled", {"database": "bank", "topic": "orders", "recalled": "yes"}),
    "inbox": (
        "inbox list",
        {
            "database": "bank", "status": "parked", "group": GROUP, "topic": "orders", "message_id": "",
            "error": "NoAcc", "fingerprint": "0123456789abcdef", "attempts_gte": "3", "discarded": "yes",
            "since": "2001-01-01T00:00:00+00:00", "until": "2001-01-01T00:00:00+00:00",
        },
    ),
    "audit": (
        "audit list",
        {
            "database": "bank", "actor": "bob", "action": "recall", "target": "", "summed": "yes",
            "since": "2001-01-01T00:00:00+00:00", "until": "2001-01-01T00:00:00+00:00",
        },
    ),
    "bulk_jobs": ("bulk list", {"database": "bank", "state": "waiting"}),
}  # fmt: skip


#: These fit all that there is, or have a list of their own.
_FITS_ALL = {"database", "producer_group", "since", "summed", "attempts_gte", "recalled"}


def _text(value: Any) -> str:
    return str(value).removesuffix("Z").removesuffix("+00:00")


@pytest.fixture(scope="module")
def full(ways: Ways) -> Ways:
    """A desk with a message in each state, bulk jobs, and what operators did: each filter leaves something out."""
    for state in HALF_STATES:
        ways.desk.half(state)
    for state in INBOX_STATES:
        ways.desk.inbox(state)
    sent = ways.desk.half("dispatched")
    ways.desk.act("resend", sent)
    ways.desk.half("undecided", topic="orders")
    ways.desk.inbox("failed", group="bank-c")
    ways.desk.operator.cancel(ways.desk.start("resend", sent).id, by="bob", why=WHY)
    ways.desk.run("INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts)"
                  " VALUES (:group, 'transfers', 0, 0, 0)", group=GROUP)  # fmt: skip
    with ways.desk.engine.begin() as connection:
        ways.desk.outbox.send(connection, "orders", {"n": 1}, key="k", tag="t", headers={"h": "x"})
    return ways


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, (_, texts) in FILTERS.items() for name in texts])
def test_each_filter_of_each_list(full: Ways, call: str, name: str) -> None:
    """The operator, the endpoint, the page and the command find the same rows by a field of a filter."""
    (command, texts), kind = FILTERS[call], types_of(call)["criteria"]
    shapes = {shape.name: shape for shape in shape_of(kind)}
    assert texts.keys() == shapes.keys(), "each field of a filter is tried"
    operator = full.desk.operator
    everything = getattr(operator, call)(kind(), PageRequest(500)).items
    named = {"message_id": lambda row: row.message_id, "target": lambda row: row.target}
    text = str(named[name](everything[0])) if name in named else texts[name]
    pairs = [(name, text), *([("status", "unconsumed")] if name == "group" and call == "messages" else [])]
    found = plain(getattr(operator, call)(read(kind, pairs), PageRequest(500)).items)
    assert (len(found) < len(everything)) or name in _FITS_ALL

    def still(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # Ages go on; UTC has two names.
        return [{name: _text(value) for name, value in row.items() if name != "age"} for row in rows]

    path = call.replace("_", "-")
    assert still(full.http.get(f"/{path}", params=[*pairs, ("page_size", "500")]).json()["items"]) == still(found)
    page = Visitor(full.http).go(f"{path}?{urlencode([*pairs, ('size', '500'), ('each', 'yes')])}")
    shown = [values for tag, values in page.tags if "id" in values and (tag == "tr" or "data-row" in values)]
    assert (page.status, len(shown)) == (200, len(found))
    if (call, name) == ("inbox", "discarded"):
        return  # commands have a list of their own for these
    options = [
        word
        for field, value in pairs
        for word in (("--in", value) if field == "database" else (_option(shapes[field]), value))
        if shapes[field].item is not bool or word.startswith("--")
    ]
    url = full.desk.engine.url.render_as_string(hide_password=False)
    result = run_cli(*command.split(), *options, "--limit", "500", "-o", "json", "--database", f"bank={url}")
    assert result.code == 0, result.err
    assert still(result.json["items"]) == still(found)
