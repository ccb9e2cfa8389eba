"""Asking a console without a socket, and a shop whose messages it shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
from fastapi import FastAPI
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Park, Settings
from outbox.console import Bearer, Principal, create_console_app, hash_token
from outbox.testing import drain

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

ROLES = ("viewer", "operator", "admin")
TOPIC, GROUP = "orders", "billing"
API = "/api/v1"


def token_of(role: str) -> str:
    """The token of somebody with this role."""
    return f"token-of-the-{role}-which-nobody-guesses"


def authorizer() -> Bearer:
    """Three people: vera may look, otto operates, ada is the admin."""
    names = {"viewer": "vera", "operator": "otto", "admin": "ada"}
    return Bearer({hash_token(token_of(role)): Principal.of(name, role) for role, name in names.items()})


def bearer(role: str) -> dict[str, str]:
    """The header by which somebody with this role is let in."""
    return {"Authorization": f"Bearer {token_of(role)}"}


class Http:
    """Sends requests to an application, as a program does from ``client``; ``asked`` counts nothing, it only asks."""

    def __init__(self, portal: BlockingPortal, app: Any, role: str | None = None, **options: Any) -> None:
        self._portal, self.app, self._options = portal, app, options
        self._headers = bearer(role) if role else {}

    def as_role(self, role: str | None) -> Http:
        """The same for somebody with another role."""
        return Http(self._portal, self.app, role, **self._options)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and return the answer; redirects are not followed."""
        address = self._options.get("client", "127.0.0.1")
        headers = self._headers | dict(options.pop("headers", {}))

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(
                self.app,
                client=(address, 5000),
                root_path=self._options.get("root_path", ""),
                raise_app_exceptions=False,
            )
            base = self._options.get("base_url", "http://localhost")
            async with httpx.AsyncClient(transport=transport, base_url=base) as client:
                return await client.request(method, path, headers=headers, **options)

        return self._portal.call(send)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET an endpoint of the API."""
        return self.ask("GET", API + path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        """POST JSON to an endpoint of the API."""
        return self.ask("POST", API + path, json={} if json is None else json, **options)


class Shop:
    """Orders and their billing, in one database; an order whose body says so is trouble for the billing."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outbox = Outbox(engine, group="shop", settings=Settings(immunity=0.0))
        self.outbox.consumer(TOPIC, group=GROUP, retry_delays=(3600.0,))(self._bill)

    @staticmethod
    def _bill(message: Message, _: Session) -> Park | None:
        trouble = message.body.get("trouble")
        if message.body.get("park"):
            return Park(trouble)
        if trouble:
            raise RuntimeError(trouble)
        return None

    def order(self, number: int = 1, **body: Any) -> UUID:
        """Send an order; ``options`` of the message by ``send``."""
        options = body.pop("send", {})
        with Session(self.engine) as session, session.begin():
            sent = {"topic": TOPIC, "key": f"order-{number}", **options}
            return self.outbox.send(session, body={"number": number, **body}, **sent)

    def orders(self, *numbers: int, **body: Any) -> list[UUID]:
        """Send several orders, each in a transaction of its own."""
        return [self.order(number, **body) for number in numbers]

    def parked(self, *numbers: int, trouble: str = "no such customer") -> list[UUID]:
        """Send orders that the billing parks, and have it do so."""
        ids = self.orders(*numbers, park=True, trouble=trouble)
        drain(self.outbox)
        return ids

    def half(self, number: int = 1) -> UUID:
        """Prepare an order and leave it undecided."""
        with Session(self.engine) as session, session.begin():
            return self.outbox.prepare(session, TOPIC, {"number": number}, key=f"order-{number}")

    def drain(self) -> None:
        """Have all orders billed."""
        drain(self.outbox)


def console_of(source: Any, **options: Any) -> FastAPI:
    """A console over a database with the three people, or an authorizer of its own."""
    return create_console_app(source, **{"authorizer": authorizer(), **options})


Asker = Callable[..., Http]


def asker(portal: BlockingPortal) -> Asker:
    """A function that makes an `Http` for an application."""
    return partial(Http, portal)
