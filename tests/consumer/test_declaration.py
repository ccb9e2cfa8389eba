"""Declarations that can't work are refused when they are made."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox, Settings
from outbox.errors import InvalidHandler, InvalidMessage


def handler(message: Any, session: Any) -> None:
    """Do nothing."""


@pytest.fixture
def app(engine: Engine, settings: Settings) -> Outbox:
    """An outbox without consumers."""
    return Outbox(engine, settings=settings)


def test_one_handler_for_a_group_of_a_topic(app: Outbox) -> None:
    """A second handler of the same group and topic is refused, and both are named; another group or topic is fine."""
    app.consumer("t", group="g")(handler)
    app.consumer("t", group="h")(handler)
    app.consumer("u", group="g")(handler)
    with pytest.raises(InvalidHandler, match=rf"consumer of 't' in group 'g' is declared already: {__name__}\.handler"):
        app.consumer("t", group="g")(lambda message, session: None)
    assert app.subscriptions["t", "g"].function is handler


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch": 0}, "batch = 0"),
        ({"threads": 0}, "threads = 0"),
        ({"on_exhausted": "skip"}, "needs ordered='key'"),
        ({"on_exhausted": "block"}, "needs ordered=True or 'key'"),
        ({"start": "last"}, "'first' or 'now'"),
        ({"on_pruned": "ignore"}, "'stop' or 'skip'"),
        ({"tags": "red"}, "not the str 'red'"),
        ({"keys": "user:*"}, "not the str"),
        ({"headers": "region=eu"}, "not the str"),
        ({"headers": ["region"]}, "'region' must be 'name=value'"),
        ({"headers": {"a=b": "c"}}, "can't have 'a=b'"),
        ({"headers": {"region": []}}, "can't have 'region'"),
    ],
)
def test_options_that_cannot_work(app: Outbox, options: dict[str, Any], error: str) -> None:
    """An option out of its range, or that contradicts another, is refused by name, and nothing is registered."""
    with pytest.raises(InvalidHandler, match=error):
        app.consumer("t", group="g", **options)(handler)
    assert not app.subscriptions


@pytest.mark.parametrize("bad", ["not callable", lambda: None, lambda message: None, lambda a, b, c: None])
def test_handlers_that_cannot_be_called(app: Outbox, bad: Any) -> None:
    """A handler that doesn't take (message, session) is refused."""
    with pytest.raises(InvalidHandler, match="consumer of 't'"):
        app.consumer("t", group="g")(bad)


@pytest.mark.parametrize("name", ["", "a b", "x" * 128, "%RETRY%g", 7])
def test_names_that_are_none(app: Outbox, name: Any) -> None:
    """A topic or group that isn't a name is refused."""
    with pytest.raises(InvalidMessage):
        app.consumer(name, group="g")(handler)
    if name not in {"%RETRY%g"}:
        with pytest.raises(InvalidMessage):
            app.consumer("t", group=name)(handler)
