"""The console in an application: pages and HTTP endpoints, behind a login, below a prefix of yours.

It prints::

    without a login: 401
    order-created: 1 message
    as a viewer sees it: {'customer': 'bob', 'card': '***'}
"""

import asyncio
import json

from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Outbox, embedded
from outbox.console import Basic, Role, create_console_router, hash_password
from outbox.database import migration


async def look(app: FastAPI) -> None:
    """Ask the console for its messages, as a page or a script does; a viewer sees bodies masked."""
    async with AsyncClient(transport=ASGITransport(app), base_url="http://localhost/outbox/api/v1") as client:
        print(f"without a login: {(await client.get('/messages')).status_code}")
        client.auth = ("victor", "a long password")
        messages = (await client.get("/messages")).json()["items"]
        print(f"{messages[0]['topic']}: {len(messages)} message")
        shown = (await client.get(f"/messages/{messages[0]['id']}")).json()
        print(f"as a viewer sees it: {json.loads(shown['body']['text'])}")


if __name__ == "__main__":
    with embedded.server(["shop"], durable=False) as server:
        migration.upgrade(server.url("shop"))
        engine = create_engine(server.url("shop"))
        outbox = Outbox(engine, group="shop")
        with Session(engine) as session, session.begin():
            outbox.send(session, "order-created", {"customer": "bob", "card": "4111 1111 1111 1111"})
        app = FastAPI()
        users = {"victor": (hash_password("a long password"), Role.VIEWER)}
        app.include_router(create_console_router(outbox, authorizer=Basic(users)), prefix="/outbox")
        asyncio.run(look(app))
        engine.dispose()
