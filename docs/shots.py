"""Take the pictures of the console that the pages show: a shop with two groups in trouble, in a real browser.

``python docs/shots.py`` writes them beside this file. It needs the extras ``test`` and ``console``, and Chromium.
"""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from uuid import UUID

from fastapi import FastAPI
from playwright.sync_api import sync_playwright
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings, embedded
from outbox.console import AllowAll, create_console_app
from outbox.database import migration
from outbox.operator.health.stats import as_sample, stats
from outbox.operator.model import InboxFilter, PageRequest
from outbox.worker import Worker
from tests.console.browser.live import serving
from tests.kit import wait_until
from tests.kit.programs import program

HERE = Path(__file__).parent
#: The pages by the names of their pictures; a parked message stands for its id.
PICTURES = {"console-overview": "/", "console-dead": "/dead", "console": "/messages/PARKED"}
_SIZE = {"width": 1280, "height": 720}
_SETTINGS = Settings(retry_interval=0.1, idle_wait=0.1, immunity=0.0)
#: So many minutes of samples are made of the first one, with a gap of some in it.
_MINUTES, _GAP = 70, range(25, 30)


class PaymentGatewayTimeout(Exception):
    """A payment provider that doesn't answer."""


def main() -> None:
    """Fill two databases, serve the console, and take the pictures."""
    with embedded.server(["shop", "warehouse"]) as server:
        for name in ("shop", "warehouse"):
            migration.upgrade(server.url(name))
        shop, warehouse = (create_engine(server.url(name)) for name in ("shop", "warehouse"))
        parked = trade(shop, warehouse)
        for engine in (shop, warehouse):
            remember(engine)
        # Since a deployment, no worker has the mailer.
        sender = Outbox(shop, group="shop", settings=_SETTINGS)
        app: FastAPI = create_console_app(shop, databases={"warehouse": warehouse}, authorizer=AllowAll())
        with Worker(sender), Worker(handlers_of(shop, warehouse, without="mailer")) as worker, serving(app) as port:
            wait_until(lambda: worker.health()["report"].last_success, "the worker has reported")
            take(f"http://127.0.0.1:{port}", parked)


def handlers_of(shop: Engine, warehouse: Engine, *, without: str = "") -> Outbox:
    """Declare the groups of the warehouse, but for one."""
    handlers = Outbox(warehouse, group="warehouse", settings=_SETTINGS)
    for topic, group, handler in (
        ("orders.created", "seat-allocation", allocate),
        ("orders.created", "mailer", settle),
        ("payments.captured", "ledger", settle),
    ):
        if group != without:
            handlers.consumer(topic, group=group, source=shop, retry_delays=(0.1,))(handler)
    return handlers


def allocate(message: Message, _: Session) -> None:
    """Fail for each ninth order."""
    if message.body["order"] % 9 == 0:
        raise PaymentGatewayTimeout("payments.example.com answered 504 after 30 s: upstream timed out")


def settle(_: Message, __: Session) -> None:
    """Do nothing."""


def trade(shop: Engine, warehouse: Engine) -> UUID:
    """Send orders and payments, have some fail, and leave a backlog; return a parked message."""
    sender = Outbox(shop, group="shop", settings=_SETTINGS)
    handlers = handlers_of(shop, warehouse)

    def send(topic: str, count: int) -> None:
        with Session(shop) as session, session.begin():
            for number in range(count):
                sender.send(session, topic, {"order": number, "total": "12.50"}, key=f"customer-{number % 40}")

    send("orders.created", 450)
    send("payments.captured", 300)

    def settled() -> bool:
        (parked, done) = (handlers.operator.inbox(InboxFilter(group=group), PageRequest(size=500)).items
                          for group in ("seat-allocation", "mailer"))  # fmt: skip
        return sum(row.status == "parked" for row in parked) == 50 and len(done) == 450

    with Worker(sender, roles=["dispatch"]), Worker(handlers):
        wait_until(settled, "all orders are handled or parked")
        send("orders.created", 250)
        wait_until(lambda: not handlers.operator.overview().tiles["pending"], "all is dispatched")
    rows = handlers.operator.inbox(InboxFilter(group="seat-allocation"), PageRequest(size=500)).items
    return next(row.message_id for row in rows if row.status == "parked")


def remember(engine: Engine) -> None:
    """Write samples of the last hour, with less and less in them."""
    with engine.connect() as connection:
        newest = json.dumps(as_sample(stats(connection, _SETTINGS, ("producer", "consumer"), seconds=5.0)))
    with engine.begin() as connection:
        now: dt.datetime = connection.scalars(text("SELECT date_trunc('minute', now())")).one()
        for back in (each for each in range(1, _MINUTES) if each not in _GAP):
            at, kept = now - dt.timedelta(minutes=back), json.loads(newest)
            numbers = [
                kept["totals"],
                *kept["topics"].values(),
                *(group for each in kept["groups"].values() for group in each.values()),
            ]
            for each in numbers:
                for name in each.keys() & {"messages", "committed", "consumed", "parked", "failed"}:
                    each[name] = int(each[name] * (1 - back / _MINUTES))
            insert = "INSERT INTO outbox.stats_sample VALUES (:at, CAST(:stats AS jsonb)) ON CONFLICT DO NOTHING"
            connection.execute(text(insert), {"at": at, "stats": json.dumps({**kept, "at": at.isoformat()})})


def take(console: str, parked: UUID) -> None:
    """Write the pictures, in the light theme."""
    with sync_playwright() as playwright:
        executable = program("chromium", "chromium-browser", "google-chrome", package="chromium")
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--no-proxy-server"])
        page = browser.new_page(viewport=_SIZE, color_scheme="light", reduced_motion="reduce")  # type: ignore[arg-type]  # sizes are what it says
        for name, path in PICTURES.items():
            page.goto(console + path.replace("PARKED", str(parked)))
            page.screenshot(path=str(HERE / f"{name}.png"))
        browser.close()


if __name__ == "__main__":
    main()
