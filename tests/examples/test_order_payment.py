"""The order example: both services one call at a time, every state of a message, and the minutes from end to end."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from examples.order_payment import account_service, order_service
from examples.order_payment.__main__ import main
from examples.order_payment.accidents import INBOX, lose
from examples.order_payment.account_service import Account, Payment, Refused, give_back, note_settled, pay
from examples.order_payment.comparison import each_minute, job
from examples.order_payment.demo import Books, make_purchases, open_books, serving
from examples.order_payment.message import CARD, GROUP, TOPIC, VOUCHER, OrderPaid
from examples.order_payment.order_service import EACH_MINUTE, Credit, Enterprise, Order, application, settle
from examples.order_payment.timeline import known, seen
from outbox import Outbox, Settings, testing
from outbox.embedded import ServerLike
from outbox.embedded.external import URL_VARIABLE
from outbox.operator.model import MessageFate, MessageFilter, PageRequest
from outbox.reconcile.job import EngineName, Outcome
from outbox.reconcile.run import reconcile
from tests.kit import rebound, sample
from tests.kit.runs import take_turn

ROOT = Path(__file__).parents[2]
#: What each user has at first.
OPENING, NOTHING = Decimal("100.00"), Decimal("0.00")
#: Each lost message is sent again once, at once.
SETTINGS = Settings(confirm_grace=0.0, confirm_resends=1)


class Services:
    """Both services on databases of their own; what workers do is done by hand, what is asked goes by HTTP."""

    def __init__(self, accounts: Engine, orders: Engine, status_url: str) -> None:
        self.accounts, self.orders = accounts, orders
        self.asking = Outbox(accounts, group="account-service", settings=SETTINGS)
        token = account_service.outbox.known_groups[TOPIC, GROUP].token
        self.asking.known_group(TOPIC, group=GROUP, status_url=status_url, token=token)
        self.asking.on_delivered(TOPIC, model=OrderPaid)(note_settled)
        parked: dict[str, Any] = {"when": "parked", "consumers": [orders]}
        self.asking.compensation(TOPIC, model=OrderPaid, **parked)(give_back)
        self.settling = Outbox(orders, group=GROUP, settings=SETTINGS)
        tags = order_service.outbox.subscriptions[TOPIC, GROUP].tags
        self.settling.consumer(TOPIC, group=GROUP, source=accounts, model=OrderPaid, tags=tags)(settle)

    def pay(self, order: int = 1, price: str = "20.00", **options: Any) -> None:
        """Have ann pay an order at acme."""
        with Session(self.accounts) as session, session.begin():
            pay(order, "ann", "acme", Decimal(price), session=session, **options)

    def deliver(self, *, failed: bool = False) -> None:
        """Dispatch and consume; with ``failed``, also retry until each message is consumed or parked."""
        testing.drain(self.asking, self.settling, failed=failed)

    def confirm(self) -> None:
        """Ask what became of the messages, have callbacks called, and carry out the compensations that are ordered."""
        testing.confirm(self.asking)
        testing.drain(self.asking)
        testing.bulk(self.asking)

    def block(self, blocked: bool = True) -> None:
        """Let the enterprise be credited no more, or again."""
        with Session(self.orders) as session, session.begin():
            session.get_one(Enterprise, "acme").blocked = blocked

    def of_user(self) -> Decimal:
        """Return what ann has."""
        with Session(self.accounts) as session:
            return session.get_one(Account, "ann").amount

    def of_enterprise(self) -> Decimal:
        """Return what acme has earned."""
        with Session(self.orders) as session:
            return session.get_one(Enterprise, "acme").amount

    def states(self, order: int = 1) -> tuple[str, str, str]:
        """Return the state of an order's payment, of the order, and of its message as the producer knows it."""
        with Session(self.accounts) as a, Session(self.orders) as b:
            known_as = list(known(self.accounts).values())[order - 1]
            return a.get_one(Payment, order).state, b.get_one(Order, order).state, known_as

    def inbox(self) -> Counter[str]:
        """Return how many messages the order service has in each status."""
        with self.orders.connect() as connection:
            return Counter(connection.scalars(select(INBOX.c.status)))

    def books(self) -> Books:
        """Return where the money is."""
        return Books.of(self.accounts, self.orders, OPENING)


@pytest.fixture
def services(new_engine: Callable[..., Engine]) -> Iterator[Services]:
    """Both services, with one user, one enterprise, and three orders that aren't paid."""
    accounts, orders = new_engine(), new_engine()
    account_service.Base.metadata.create_all(accounts)
    order_service.Base.metadata.create_all(orders)
    with Session(accounts) as session, session.begin():
        session.add(Account(user="ann", amount=OPENING))
    with Session(orders) as session, session.begin():
        session.add(Enterprise(name="acme", amount=Decimal(0)))
        session.flush()
        session.add_all(Order(id=each, user="ann", enterprise="acme", price=Decimal("20.00")) for each in (1, 2, 3))
    with (
        rebound((account_service.outbox, accounts), (order_service.outbox, orders)),
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        host, port = listening.getsockname()
        both = Services(accounts, orders, f"http://{host}:{port}/inbox/status")
        with serving(application(both.settling), listening):
            yield both


def test_debit_and_message_are_committed_together(services: Services) -> None:
    """Both are there after the commit; neither after a rollback. The message is sent, and nobody has asked so far."""
    with Session(services.accounts) as session:
        pay(1, "ann", "acme", Decimal("20.00"), session=session)
        session.rollback()
    assert (services.of_user(), known(services.accounts)) == (OPENING, {})
    services.pay()
    assert services.of_user() == Decimal("80.00")
    assert services.states() == ("debited", "unpaid", "sent")


def test_a_payment_that_is_not_covered_leaves_no_trace(services: Services) -> None:
    """One clear reason, and no message."""
    with pytest.raises(Refused, match=r"ann has 100\.00, needs 100\.01"):
        services.pay(price="100.01")
    with pytest.raises(Refused, match="no account of eve"), Session(services.accounts) as session:
        pay(1, "eve", "acme", Decimal("1.00"), session=session)
    assert (services.of_user(), known(services.accounts)) == (OPENING, {})


def test_an_order_is_marked_as_paid_and_its_enterprise_credited_once(services: Services) -> None:
    """However often the message is delivered."""
    services.pay()
    services.deliver()
    services.deliver()
    assert (services.of_user(), services.of_enterprise()) == (Decimal("80.00"), Decimal("20.00"))
    assert services.states() == ("debited", "paid", "sent")
    with services.orders.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(Credit)) == 1


def test_consumed_is_known_by_http_and_the_payment_settled(services: Services) -> None:
    """The account service asks the order service's endpoint, and brings its own state to what that says."""
    services.pay()
    services.confirm()
    assert services.states() == ("debited", "unpaid", "sent")
    services.deliver()
    services.confirm()
    assert services.states() == ("settled", "paid", "consumed")
    assert services.books().agree


def test_a_failure_is_known_and_healed_by_a_retry(services: Services) -> None:
    """While the enterprise is blocked, the message has failed; afterwards it is consumed."""
    services.block()
    services.pay()
    services.deliver()
    services.confirm()
    assert services.states() == ("debited", "unpaid", "failed")
    services.block(False)
    services.deliver(failed=True)
    services.confirm()
    assert services.states() == ("settled", "paid", "consumed")


def test_parked_after_the_last_retry_is_rolled_back_by_itself(services: Services) -> None:
    """The money is back without an operator, the message quarantined; what is unblocked later changes nothing."""
    services.block()
    services.pay()
    services.deliver(failed=True)
    assert services.inbox() == {"parked": 1}
    services.confirm()
    assert services.states() == ("returned", "unpaid", "rolled back")
    assert (services.of_user(), services.inbox()) == (OPENING, {"quarantined": 1})
    services.block(False)
    services.deliver(failed=True)
    services.confirm()
    assert (services.of_user(), services.of_enterprise()) == (OPENING, NOTHING)
    assert services.books().agree


@pytest.mark.parametrize(
    ("order", "price", "reason"),
    [(9, "20.00", "no order 9 of 20.00 at acme"), (1, "0.01", "no order 1 of 0.01 at acme")],
)
def test_what_is_no_order_is_parked_with_its_reason(services: Services, order: int, price: str, reason: str) -> None:
    """Also if another amount was paid than the order's; and the money goes back."""
    services.pay(order, price)
    services.deliver()
    with services.orders.connect() as connection:
        assert connection.execute(select(INBOX.c.status, INBOX.c.last_error)).one() == ("parked", reason)
    services.confirm()
    assert services.of_user() == OPENING
    assert set(known(services.accounts).values()) == {"rolled back"}


def test_an_order_is_not_paid_twice(services: Services) -> None:
    """Were the same payment announced by another message, the order service parks that."""
    services.pay()
    with Session(services.accounts) as session, session.begin():
        again = OrderPaid(order_id=1, user="ann", enterprise="acme", price=Decimal("20.00"))
        account_service.outbox.send(session, TOPIC, again, key="acme", tag=CARD)
    services.deliver()
    assert services.inbox() == {"consumed": 1, "parked": 1}
    assert services.of_enterprise() == Decimal("20.00")


def test_what_is_lost_is_sent_again_and_consumed(services: Services) -> None:
    """A restore has undone the order service's work, and its inbox doesn't know the message any more."""
    services.pay()
    services.deliver()
    assert len(lose(services.orders, 1, seed=1)) == 1
    assert (services.of_enterprise(), services.states()) == (NOTHING, ("debited", "unpaid", "sent"))
    services.confirm()
    assert services.states() == ("debited", "unpaid", "unconsumed")
    services.deliver()
    services.confirm()
    assert services.states() == ("settled", "paid", "consumed")
    assert (services.of_enterprise(), services.books().agree) == (Decimal("20.00"), True)


def test_what_stays_lost_is_given_up_and_rolled_back_by_an_operator(services: Services) -> None:
    """A voucher is left out by the order service's filter, of which the account service wasn't told."""
    services.pay(by=VOUCHER)
    for _ in range(3):
        services.deliver()
        services.confirm()
    assert services.states() == ("debited", "unpaid", "resend_exhausted")
    services.confirm()
    assert services.states() == ("debited", "unpaid", "resend_exhausted")
    services.asking.operator.compensate(_only(services), by="alice", why="no vouchers")
    services.confirm()
    assert services.states() == ("returned", "unpaid", "rolled back")
    assert seen(services.accounts) == {"sent", "unconsumed", "resend_exhausted", "rolled back"}
    assert (services.of_user(), services.books().agree) == (OPENING, True)


def test_an_operator_sends_again_lists_and_rolls_back_only_what_took_no_effect(services: Services) -> None:
    """The console's three: a list by status, page by page, a resend that is idempotent, and a guarded rollback."""
    for order in (1, 2, 3):
        services.pay(order)
    services.deliver()
    services.confirm()
    operator = services.asking.operator
    consumed = MessageFilter(status=(MessageFate.CONSUMED,))
    first = operator.messages(consumed, PageRequest(size=2))
    second = operator.messages(consumed, PageRequest(size=2, token=first.next_page_token))
    assert {row.id for row in (*first.items, *second.items)} == known(services.accounts).keys()
    assert (len(first.items), len(second.items)) == (2, 1)
    message = first.items[0].id
    operator.resend(message, by="alice", why="to be sure")
    services.deliver()
    assert services.of_enterprise() == Decimal("60.00")
    job_ = operator.compensate(message, by="alice", why="by mistake", acknowledge_delivered=False)
    testing.bulk(services.asking)
    done = operator.bulk_job(job_.id)
    assert (done.done, done.skipped) == (0, 1)
    assert services.of_user() == Decimal("40.00")


def test_the_reconciliation_agrees_to_the_cent(services: Services) -> None:
    """Consumed, rolled back and left out are no differences; a payment whose credit is lost is one."""
    services.pay(1)
    services.deliver()
    services.confirm()
    services.pay(2, by=VOUCHER)
    services.deliver()
    assert not reconcile(_job(services)).measures[0].in_sync
    services.asking.operator.compensate(_newest(services), by="alice", why="no vouchers")
    services.confirm()
    assert reconcile(_job(services)).in_sync
    lose(services.orders, 1, seed=1)
    (pair,) = reconcile(_job(services)).pairs
    assert pair.differences == {Outcome.MISSING: 1}


def test_the_scheduler_tells_what_is_lost_within_a_minute(services: Services) -> None:
    """The worker's comparison is that of the file, by its timetable; the loss is in its record until it is healed."""
    declared = order_service.outbox.reconciliations[EACH_MINUTE]
    assert declared.seconds == 60.0
    settling = services.settling
    settling.reconciliation(
        EACH_MINUTE, every=60, config=declared.config, job={"window": {"grace": 0.0}, "keep_for": 0}
    )

    def minute() -> str:
        with services.orders.begin() as connection:
            past = "started_at = started_at - interval '61 s', finished_at = finished_at - interval '61 s'"
            connection.execute(text(f"UPDATE outbox.reconciliation_run SET {past}"))
        take_turn(services.orders, settling)
        return each_minute(services.orders)[0].state

    services.pay(1)
    services.deliver()
    assert minute() == "in_sync"
    lose(services.orders, 1, seed=1)
    assert minute() == "different"
    services.confirm()
    services.deliver()
    assert minute() == "in_sync"


@pytest.mark.parametrize("field", ["paid_in", "users", "enterprises"])
def test_a_cent_that_is_missing_anywhere_is_seen(field: str) -> None:
    """The books agree only if all of them do, and each payment has an end."""
    books = Books(Decimal("8.00"), Decimal("3.00"), Decimal("5.00"), Counter(settled=2, returned=1), 0)
    assert books.agree
    assert not replace(books, **{field: getattr(books, field) + Decimal("0.01")}).agree
    assert not replace(books, payments=Counter(settled=2, debited=1)).agree
    assert not replace(books, unlike=1).agree


def test_the_purchases_of_a_seed_are_the_same(new_engine: Callable[..., Engine]) -> None:
    """And the users have what they cost."""
    purchases = make_purchases(100, seed=4)
    assert purchases == make_purchases(100, seed=4)
    assert purchases != make_purchases(100, seed=5)
    assert Counter(each.by for each in purchases) == {CARD: 95, VOUCHER: 5}
    accounts, orders = new_engine(), new_engine()
    assert open_books(accounts, orders, purchases) == sum(each.price for each in purchases)


@pytest.mark.parametrize("engine", sample(["local", pytest.param("spark", marks=pytest.mark.slow)], 1))
def test_every_state_is_seen_and_each_payment_ends(server: ServerLike, engine: str) -> None:
    """As a command: the scheduler at work each minute, the states over time, and the sums equal to the cent."""
    command = [sys.executable, "-m", "examples.order_payment", "--orders", "40", "--engine", engine, "--minute", "0.5"]
    environment = {**os.environ, URL_VARIABLE: server.url("postgres")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "What the account service knows" in done.stdout
    for event in ("losses are known", "failures are known", "parked: money back", "given up: by hand"):
        assert event in done.stdout
    compared = re.search(r"Each minute the services were compared: (\d+) times, (\d+) of them with diff", done.stdout)
    assert compared, done.stdout
    assert int(compared[1]) >= int(compared[2]) >= 1
    assert "In sync: each order is paid, or the money is back, and not a cent is missing." in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--orders", "0"], ["--orders", "many"], ["--engine", "auto"], ["--minute", "soon"]]
)
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


def _job(services: Services) -> Any:
    return job(services.accounts, services.orders, EngineName.LOCAL)


def _only(services: Services) -> UUID:
    (message,) = known(services.accounts)
    return message


def _newest(services: Services) -> UUID:
    return max(known(services.accounts))
