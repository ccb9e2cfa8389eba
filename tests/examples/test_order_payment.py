"""The order example: service function and handler one call at a time, the accidents, and the whole day."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from examples.order_payment import balance_service, order_service
from examples.order_payment.__main__ import main
from examples.order_payment.accidents import INBOX, cause
from examples.order_payment.balance_service import EnterpriseBalance, UserBalance
from examples.order_payment.comparison import job, top_up
from examples.order_payment.demo import Purchase, Sums, make_purchases, open_balances
from examples.order_payment.message import TOPIC
from examples.order_payment.order_service import place_order
from outbox import Settings
from outbox.consumer.consumer import Consumer
from outbox.dispatch.once import dispatch_once
from outbox.embedded import ServerLike
from outbox.embedded.external import URL_VARIABLE
from outbox.reconcile.job import EngineName, Outcome
from outbox.reconcile.rows import to_findings
from outbox.reconcile.run import reconcile
from tests.kit import rebound

ROOT = Path(__file__).parents[2]


class Services:
    """Both services on databases of their own; what workers do is done by hand."""

    def __init__(self, orders: Engine, balances: Engine) -> None:
        self.orders, self.balances = orders, balances

    def place(self, *purchases: Purchase) -> None:
        """Place orders, each in a transaction of its own."""
        for purchase in purchases:
            with Session(self.orders) as session, session.begin():
                place_order(purchase.user, purchase.enterprise, purchase.price, session=session)

    def deliver(self) -> None:
        """Dispatch, consume and retry all that there is."""
        settings = Settings()
        consumer = Consumer(balance_service.outbox.subscriptions[TOPIC, balance_service.GROUP], settings)
        with self.orders.connect() as source, self.balances.connect() as connection:
            dispatch_once(source, settings)
            consumer.start(connection, source)
            while consumer.consume_once(connection, source) or consumer.retry_once(connection, source):
                pass

    def of_user(self, name: str) -> Decimal:
        """Return the balance of a user."""
        with Session(self.balances) as session:
            return session.get_one(UserBalance, name).amount

    def of_enterprise(self, name: str) -> Decimal:
        """Return the balance of an enterprise."""
        with Session(self.balances) as session:
            return session.get_one(EnterpriseBalance, name).amount

    def count(self, what: str) -> int:
        """Return how many rows a table has."""
        engine = self.orders if what in {"customer_order", "outbox.half_message"} else self.balances
        with engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(text(what))) or 0

    def differences(self) -> dict[Outcome, set[object]]:
        """Reconcile, and return the messages that differ by kind."""
        found: dict[Outcome, set[object]] = {}
        for pair in reconcile(job(self.orders, self.balances, EngineName.LOCAL)).pairs:
            for finding in to_findings(pair.findings):
                found.setdefault(finding.outcome, set()).add(finding.id)
        return found


@pytest.fixture
def services(new_engine: Callable[..., Engine]) -> Iterator[Services]:
    """Both services, with the balances for two users and one enterprise."""
    both = Services(new_engine(), new_engine())
    order_service.Base.metadata.create_all(both.orders)
    balance_service.Base.metadata.create_all(both.balances)
    with Session(both.balances) as session, session.begin():
        session.add_all([UserBalance(user="ann", amount=Decimal("50.00")), UserBalance(user="bob", amount=Decimal(0))])
        session.add(EnterpriseBalance(enterprise="acme", amount=Decimal(0)))
    with rebound((order_service.outbox, both.orders), (balance_service.outbox, both.balances)):
        yield both


def test_order_and_message_are_committed_together(services: Services) -> None:
    """Both are there after the commit; neither after a rollback."""
    with Session(services.orders) as session:
        place_order("ann", "acme", Decimal("20.00"), session=session)
        session.rollback()
    assert (services.count("customer_order"), services.count("outbox.half_message")) == (0, 0)
    services.place(Purchase("ann", "acme", Decimal("20.00")))
    assert (services.count("customer_order"), services.count("outbox.half_message")) == (1, 1)


def test_an_order_moves_its_price_once(services: Services) -> None:
    """From the user's balance to the enterprise's, with one payment, however often the message is delivered."""
    services.place(Purchase("ann", "acme", Decimal("20.00")))
    services.deliver()
    services.deliver()
    assert services.of_user("ann") == Decimal("30.00")
    assert services.of_enterprise("acme") == Decimal("20.00")
    assert services.count("payment") == 1


@pytest.mark.parametrize(
    ("purchase", "reason"),
    [
        (Purchase("bob", "acme", Decimal("0.01")), "balance too low: bob has 0.00, needs 0.01"),
        (Purchase("eve", "acme", Decimal("1.00")), "no user eve"),
        (Purchase("ann", "evil", Decimal("1.00")), "no enterprise evil"),
    ],
)
def test_an_order_that_cannot_be_paid_is_parked(services: Services, purchase: Purchase, reason: str) -> None:
    """With the reason, and without a trace in the balances."""
    services.place(purchase)
    services.deliver()
    with services.balances.connect() as connection:
        assert connection.execute(select(INBOX.c.status, INBOX.c.last_error)).one() == ("parked", reason)
        assert connection.scalar(select(func.sum(UserBalance.amount))) == Decimal("50.00")
    assert services.count("payment") == 0


def test_the_accidents_are_found_as_what_they_are(services: Services) -> None:
    """What is lost is missing, what is forgotten is unrecorded, what is garbled contradicts the payments."""
    services.place(*[Purchase("ann", "acme", Decimal("1.00"))] * 10)
    services.deliver()
    assert services.differences() == {}
    accidents = cause(services.balances, number=2, seed=1)
    assert services.differences() == {
        Outcome.MISSING: set(accidents.lost),
        Outcome.UNRECORDED: set(accidents.forgotten),
        Outcome.STATUS_MISMATCH: set(accidents.garbled),
    }
    # Two payments were undone: their money is back where it came from.
    assert services.of_user("ann") == Decimal("42.00")
    assert services.of_enterprise("acme") == Decimal("8.00")


def test_all_is_repaired_but_what_users_lack_and_then_that_too(services: Services) -> None:
    """The repair resends and writes down; who has no money needs a human first."""
    services.place(*[Purchase("ann", "acme", Decimal("1.00"))] * 9, Purchase("bob", "acme", Decimal("7.00")))
    services.deliver()
    cause(services.balances, number=3, seed=1)
    repaired = reconcile(job(services.orders, services.balances, EngineName.LOCAL, apply=True))
    services.deliver()
    ((kind, parked),) = services.differences().items()
    assert (kind, len(parked)) == (Outcome.PARKED, 1)
    assert top_up(repaired, services.orders, services.balances) == Decimal("7.00")
    services.deliver()
    assert services.differences() == {}
    assert services.of_enterprise("acme") == Decimal("16.00")
    assert Sums.of(services.orders, services.balances, Decimal("57.00")).agree


def test_who_is_no_user_stays_parked(services: Services) -> None:
    """The operator pays in for users, and for nobody else."""
    services.place(Purchase("eve", "acme", Decimal("1.00")))
    services.deliver()
    result = reconcile(job(services.orders, services.balances, EngineName.LOCAL))
    assert top_up(result, services.orders, services.balances) == 0
    assert services.differences().keys() == {Outcome.PARKED}


@pytest.mark.parametrize("field", ["paid_in", "users", "enterprises", "ordered", "paid"])
def test_a_cent_that_is_missing_anywhere_is_seen(field: str) -> None:
    """The sums agree only if all of them do."""
    sums = dict.fromkeys(("ordered", "paid", "enterprises"), Decimal("5.00"))
    sums |= {"paid_in": Decimal("8.00"), "users": Decimal("3.00")}
    assert Sums(**sums).agree
    assert not Sums(**{**sums, field: sums[field] + Decimal("0.01")}).agree


def test_the_first_user_can_pay_only_half(new_engine: Callable[..., Engine]) -> None:
    """The purchases are the same for the same seed, and so are the balances."""
    purchases = make_purchases(100, seed=4)
    assert purchases == make_purchases(100, seed=4)
    assert purchases != make_purchases(100, seed=5)
    orders, balances = new_engine(), new_engine()
    paid_in = open_balances(orders, balances, purchases)
    with Session(balances) as session:
        amounts = {user.user: user.amount for user in session.scalars(select(UserBalance))}
    assert sum(amounts.values()) == paid_in
    costs = {name: sum((w.price for w in purchases if w.user == name), Decimal()) for name in amounts}
    assert amounts.pop("user-01") < costs.pop("user-01")
    assert amounts == costs


@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.slow)])
def test_the_day_ends_in_sync(server: ServerLike, engine: str) -> None:
    """As a command: orders, accidents, repair, and the sums equal to the cent; nothing but the report is printed."""
    command = [sys.executable, "-m", "examples.order_payment", "--orders", "100", "--engine", engine]
    environment = {**os.environ, URL_VARIABLE: server.url("postgres")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "100 orders were placed. Then there were accidents: 5 lost, 5 forgotten, 5 garbled." in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    for kind in ("missing", "unrecorded", "status_mismatch"):
        assert [kind, "5", "5", "0"] in lines
    assert "In sync: both services agree, and the sums are equal to the cent." in done.stdout


@pytest.mark.parametrize("arguments", [["--orders", "0"], ["--orders", "many"], ["--engine", "auto"]])
def test_bad_options_of_the_order_example_end_with_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence on stderr that names the option."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert arguments[0] in said
    assert "Traceback" not in said
