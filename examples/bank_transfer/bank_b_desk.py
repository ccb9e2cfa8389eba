"""Bank B's desk, by HTTP: bank A asks, before it debits, whether bank B would credit a transfer.

Neither bank needs the other's database for it. The answer may be stale when the money arrives: that is why `credit`
looks again, and why bank A refunds a transfer refused then.

The demo runs it as a process of its own, which may be killed like any other: it keeps no state but that in the
database. There, customers close their accounts in the worst moment: when bank A has just been told that all is well.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection

import uvicorn
from fastapi import FastAPI
from sqlalchemy.orm import Session

from .bank_b import Account, engine, objection
from .lifeline import Lifeline
from .message import Inquiry, Reply


def desk(closing: Collection[int] = ()) -> FastAPI:
    """Return the application; after an inquiry about one of the transfers in ``closing``, the receiver's is closed."""
    app = FastAPI(title="Bank B", docs_url=None, redoc_url=None)

    @app.post("/inquiries")
    def answer(inquiry: Inquiry) -> Reply:
        """Say whether bank B would credit this at the moment."""
        with Session(engine) as session, session.begin():
            account = session.get(Account, inquiry.receiver)
            reply = Reply(objection=objection(inquiry.receiver, inquiry.amount, account))
            if account is not None and inquiry.transfer_id in closing:
                account.closed = True
        return reply

    return app


def arguments(listening: socket.socket, closing: Collection[int]) -> list[str]:
    """Return the command line arguments of a desk, which inherits the socket."""
    return [str(listening.fileno()), *map(str, sorted(closing))]


def main() -> None:
    """Run a desk from its command line; see `arguments`."""
    lifeline = Lifeline()
    number, *closing = map(int, sys.argv[1:])
    config = uvicorn.Config(desk(closing), log_level="warning", timeout_graceful_shutdown=1)
    with socket.socket(fileno=number) as listening:
        lifeline.report(ready=True)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
