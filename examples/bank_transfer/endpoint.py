"""The endpoint of a bank that gets the other bank's messages by webhooks, as Standard Webhooks signs them.

A message is stored first, under the id that it has at the other bank, as a message of a topic of this database; only
then the answer is 2xx. So what is posted again, since an answer was lost, is stored once. The topic has consumers like
any other. The code that verifies a signature follows the specification, and has nothing of the publisher's.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import sys
import time
from importlib import import_module
from typing import Annotated
from urllib.parse import unquote
from uuid import UUID

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from pydantic import BaseModel, ValidationError
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Outbox

from .lifeline import Lifeline, report
from .via import Between

#: How old (seconds) a signature may be, or how far ahead of this clock.
TOLERANCE = 300.0


def endpoint(outbox: Outbox, engine: Engine, topic: str, model: type[BaseModel], secret: str) -> FastAPI:
    """Return the application that stores what is signed with the secret, as messages of the topic."""
    app = FastAPI(title="Webhooks", docs_url=None, redoc_url=None)

    @app.post("/", status_code=204)
    def store(
        body: Annotated[bytes, Depends(_body)],
        webhook_id: Annotated[UUID, Header()],
        webhook_timestamp: Annotated[int, Header()],
        webhook_signature: Annotated[str, Header()],
        ce_partitionkey: Annotated[str | None, Header()] = None,
    ) -> None:
        """Store a message."""
        signed = f"{webhook_id}.{webhook_timestamp}.".encode() + body
        if abs(time.time() - webhook_timestamp) > TOLERANCE or not verified(signed, webhook_signature, secret):
            raise HTTPException(401, "this isn't signed with the secret that we share, or was signed long ago")
        try:
            told = model.model_validate_json(body)
        except ValidationError as error:
            raise HTTPException(422, str(error)) from None
        key = None if ce_partitionkey is None else unquote(ce_partitionkey)
        report(taken=1)
        with Session(engine) as session, session.begin():
            outbox.send(session, topic, told, id=webhook_id, on_duplicate="ignore", key=key)

    return app


async def _body(request: Request) -> bytes:
    return await request.body()


def verified(signed: bytes, signatures: str, secret: str) -> bool:
    """Tell whether one of the signatures of a call is that of what was signed."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    expected = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    return any(hmac.compare_digest(expected.encode(), each.encode()) for each in signatures.split())


def main() -> None:
    """Run an endpoint: the arguments are the module of its bank, and the number of the socket, which it inherits."""
    lifeline = Lifeline()
    bank, between = import_module(f".{sys.argv[1]}", __package__), Between.of_environment()
    topic, model = bank.TAKEN
    app = endpoint(bank.intake, bank.engine, topic, model, between.secrets[topic])
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    with socket.socket(fileno=int(sys.argv[2])) as listening:
        lifeline.report(ready=True)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
