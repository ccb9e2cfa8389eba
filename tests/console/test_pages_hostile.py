"""What others wrote is text on every page, whatever it looks like: markup, scripts, what steers a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from uuid import UUID

import pytest

from outbox.acts.changes import Actor, Target
from outbox.embedded import ServerLike
from outbox.operator.model import Selector
from outbox.operator.operator import Operator
from outbox.settings import Settings
from tests.console.test_pages_look import well_made
from tests.console.visitor import Visitor
from tests.console.web import GROUP, Asker, Shop, console_of
from tests.kit.databases import clones

SCRIPT = """'"><script src=/x>alert(1)</script><img src=x onerror=alert(2)><a hx-get=/y hx-trigger=load>{{ 7*7 }}</a>"""
#: Turns the direction of reading around, rings a bell, colours a terminal, joins lines.
STEERING = "paid \u202e00.1\u202c \x07\x1b[31mred\x1b[0m \u2028line\u200b"


@pytest.fixture(scope="module")
def hostile(server: ServerLike, template: str) -> Iterator[Shop]:
    """A shop whose customers are attackers."""
    with clones(server, template, "console_hostile") as (engine,):
        yield Shop(engine)


@pytest.fixture(scope="module")
def message(hostile: Shop) -> UUID:
    """A message that is hostile wherever somebody else may write something."""
    options = {"key": SCRIPT, "tag": SCRIPT[:100], "headers": {SCRIPT: STEERING, "plain": SCRIPT}}
    first = hostile.order(1, park=True, trouble=SCRIPT, send=options, **{SCRIPT: STEERING})
    second = hostile.order(2, park=True, trouble=STEERING, send={"key": STEERING.replace("\x07", "")})
    hostile.drain()
    operator = Operator.open({"shop": hostile.engine}, Settings())
    actor = Actor(SCRIPT, {"via": SCRIPT, "ip": STEERING})
    operator.act("discard", Target(second, GROUP), by=actor, why=SCRIPT)
    operator.start("retry", Selector((Target(first, GROUP),)), by=actor, why=STEERING)
    return first


@pytest.fixture(scope="module")
def visitor(hostile: Shop, ask: Asker) -> Iterator[Visitor]:
    """The admin of that shop."""
    app = console_of(hostile.outbox, environment=SCRIPT)
    yield Visitor(ask(app, "admin"))
    app.state.console.source.close()


@pytest.mark.parametrize(
    "path",
    ["", "messages", "messages/{id}", "messages/{id}/conversation",
     "dead", "dead?tab=discarded", "inbox", "bulk-jobs", "audit", "system",
     "messages/{id}/do/retry?group=billing", "messages/{id}/do/compensate",
     "bulk?action=discard&of=inbox&status=parked"],
)  # fmt: skip
def test_it_stays_text(visitor: Visitor, message: UUID, path: str) -> None:
    """To the letter, escaped; no element, attribute or template comes of it, and no control character remains."""
    response = visitor.http.ask("GET", "/" + path.format(id=message))
    page = visitor.go(path.format(id=message))
    assert page.status == 200
    well_made(page)
    assert "<script src=/x>" not in response.text
    assert "<img src=x" not in response.text
    assert escape("<script src=/x>") in response.text
    assert not [values for _, values in page.tags if values.get("hx-trigger") == "load" or values.get("href") == "/y"]
    assert not [c for c in response.text if not c.isprintable() and c != "\n"]


def test_what_steers_is_written_out(visitor: Visitor, message: UUID) -> None:
    """Nobody can make a line look like another one."""
    text = visitor.go(f"messages/{message}").text
    assert "\\u202e00.1\\u202c" in text
    assert "\\x1b[31mred" in text


def test_a_revealed_body_is_text_too(visitor: Visitor, message: UUID) -> None:
    """Also unmasked, it is only read."""
    page = visitor.send(visitor.go("messages").forms[0], q=str(message))
    response = visitor.http.ask("POST", f"/messages/{message}/reveal")
    assert page.status == response.status_code == 200
    assert "<script src=/x>" not in response.text


@pytest.mark.parametrize(
    "path",
    [
        "messages?topic={x}", "messages?status={x}", "messages?after={x}", "messages?trail={x}", "messages?{x}={x}",
        "messages/{x}", "bulk-jobs/{x}", "?did={x}", "?window={x}", "dead?group={x}&tab={x}", "jump?q={x}", "{x}",
        "bulk?action={x}&of={x}", "messages/{x}/do/{x}", "audit?actor={x}&within={x}",
    ],
)  # fmt: skip
def test_a_link_brings_nothing_with_it(visitor: Visitor, path: str) -> None:
    """What stands in a URL comes back as text at most, in links only as a part of a query."""
    quoted = "%22%3E%3Cscript%20src%3D%2Fx%3Ealert(1)%3C%2Fscript%3E"
    page = visitor.go(path.replace("{x}", quoted))
    assert page.status in {200, 404, 422}
    assert "/x" not in [values.get("src") for name, values in page.tags if name == "script"]
    well_made(page)
