"""Flask with Flask-SQLAlchemy: the Outbox is bound when the application is made, and sends with its session."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask, abort, current_app
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Session

from outbox import INJECTED, Message, Outbox, Settings
from outbox.errors import InvalidSettings, NotBound
from outbox.telemetry.hooks import add_observer
from outbox.worker import Worker
from tests.frameworks.conftest import NOTE, SELL, Shop


class Project:
    """What a module of a Flask project has at its import, and its application factory."""

    def __init__(self) -> None:
        self.db = SQLAlchemy()
        self.outbox = outbox = Outbox(settings=Settings())

        @outbox.transactional(topic="sold")
        def sell(number: int, session: Session = INJECTED) -> dict[str, int]:
            session.execute(SELL, {"number": number})
            return {"number": number}

        @outbox.consumer("sold", group="counting")
        def count(message: Message, session: Session) -> None:
            session.execute(NOTE, {"number": message.body["number"] + current_app.config["BONUS"]})

        self.sell = sell
        self.app = Flask("shop")

    def create_app(self, url: str) -> Flask:
        """Make the application, and bind the Outbox."""
        self.app = app = Flask("shop")
        app.config.update(SQLALCHEMY_DATABASE_URI=url, BONUS=100)
        self.db.init_app(app)
        with app.app_context():
            self.outbox.bind(self.db.engine)

        @app.post("/mine/<int:number>")
        def mine(number: int) -> tuple[dict[str, Any], int]:
            self.sell(number, session=self.db.session)  # type: ignore[arg-type]  # it is made for what it proxies
            if number == 404:
                abort(404)
            self.db.session.commit()
            return {"number": number}, 201

        @app.post("/own/<int:number>")
        def own(number: int) -> tuple[dict[str, int], int]:
            return self.sell(number), 201

        return app


@pytest.mark.parametrize("way", ["mine", "own"])
def test_sold_sent_and_handled(way: str, shop: Shop) -> None:
    """With the request's session, or a transaction of the function's own: row and message, or neither."""
    project = Project()
    client = project.create_app(shop.url).test_client()
    numbers = (7, 7, 404, 8) if way == "mine" else (7, 7, 8)
    answers = [client.post(f"/{way}/{number}").status_code for number in numbers]
    assert answers == ([201, 500, 404, 201] if way == "mine" else [201, 500, 201])
    forget = add_observer(lambda activity: project.app.app_context())
    with Worker(project.outbox):
        assert shop.wait_for_effects(2) == [107, 108]
    forget()
    assert (shop.sales(), shop.sent()) == ([7, 8], ['{"number":7}', '{"number":8}'])
    dispose(project)


def test_an_application_is_made_twice(shop: Shop) -> None:
    """As tests do: a second one needs the Outbox to be unbound first, and the error says so."""
    project = Project()
    with pytest.raises(NotBound):
        project.sell(1)
    project.create_app(shop.url)
    first = project.app
    with pytest.raises(InvalidSettings, match=r"as in tests, call unbind\(\) first"):
        project.create_app(shop.url)
    project.outbox.unbind()
    project.db = SQLAlchemy()
    client = project.create_app(shop.url).test_client()
    assert client.post("/own/7").status_code == 201
    assert first is not project.app
    dispose(project)


def dispose(project: Project) -> None:
    """Close the connections of a project."""
    with project.app.app_context():
        project.db.engine.dispose()
