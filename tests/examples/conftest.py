"""The demo on the server of the test run, and a small file of orders with every kind of bad row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from examples.bank_transfer import bank_a, bank_b, processes
from examples.bank_transfer import demo as demo_module
from examples.bank_transfer.banks import Banks
from examples.bank_transfer.demo import DemoOptions, run
from examples.bank_transfer.report import Report
from outbox.embedded import ServerLike
from outbox.embedded.external import URL_VARIABLE
from outbox.reconcile.job import EngineName
from tests.kit import rebound
from tests.kit.warm import FORKING

HEADER = '"order_id";"account_id";"bank_to";"account_to";"amount";"k_symbol"'

#: (row, why it is refused; None: it is not), from line 2 on.
ROWS: tuple[tuple[str, str | None], ...] = (
    ('901;1;"AB";"71000001";400.00;"RENT"', None),
    ('902;2;"CD";"71000002";0.01;" "', None),
    ('903;404;"AB";"71000009";10.00;"RENT"', "no account 404 at bank A"),
    ('904;1;"AB";"71000001";-5.00;"RENT"', "amount '-5.00' is negative"),
    ('905;1;"AB";"71000001";0.00;"RENT"', "amount is zero"),
    ('906;1;"AB";"71000001";1O.50;"RENT"', "amount '1O.50' is not a number"),
    ('907;1;"AB";"71000001";1,50;"RENT"', "amount '1,50' is not a number"),
    ('908;1;"AB";"71000001";1.005;"RENT"', "amount '1.005' has more than 2 decimals"),
    ('909;1;"AB";"71000001"', "4 columns, 6 expected"),
    ('901;2;"AB";"71000001";1.00;"RENT"', "order_id 901 came before, in line 2"),
    ('910;1;"AB";"71000003";700.00;"LOAN"', "insufficient funds: account 1 has 600.00, needs 700.00"),
    ('911;1;"AB";"71000003";600;"LOAN"', None),
    ('912;1;"AB";"71000003";0.01;"LOAN"', "insufficient funds: account 1 has 0.00, needs 0.01"),
    ('x913;1;"AB";"71000001";1.00;"RENT"', "order_id 'x913' is not a positive whole number of at most 63 bits"),
    ('914;-1;"AB";"71000001";1.00;"RENT"', "account_id '-1' is not a positive whole number of at most 63 bits"),
    ('915;1;"";"71000001";1.00;"RENT"', "bank_to is empty"),
    ('916;1;"AB;"71000001";1.00;"RENT"', "not a row of a CSV file: ';' expected after '\"'"),
    ('917;1;"AB";"71000001";99999999999;"RENT"', "amount '99999999999' is more than 1000000000.00"),
    ('918;2;"EF";"71000004";999.99;"LEASE"', None),
)
ORDERS_BALANCE = "1000.00"
ACCOUNTS = "1\n2\n3\n"
REFUSED = [(line, reason) for line, (_, reason) in enumerate(ROWS, start=2) if reason]
GOOD_IDS = {901, 902, 911, 918}


class Ran(NamedTuple):
    """What a run of the demo left behind: its exit code, its report, and what it told people on stdout and stderr."""

    code: int
    report: dict[str, Any]
    out: str
    err: str


Demo = Callable[..., Ran]
#: One teller and one consumer: where nothing is to go on at once, two would only take longer to start.
ALONE = {"producers": 1, "consumers": 1}


@pytest.fixture
def banks(new_engine: Callable[..., Engine]) -> Iterator[Banks]:
    """Two banks on databases of their own."""
    both = Banks(new_engine(), new_engine())
    bank_a.Base.metadata.create_all(both.a)
    bank_b.Base.metadata.create_all(both.b)
    with rebound((bank_a.outbox, both.a), (bank_b.outbox, both.b)):
        yield both


@pytest.fixture
def orders_file(tmp_path: Path) -> Path:
    """A file with every kind of bad row between good ones."""
    file = tmp_path / "orders.csv"
    file.write_text("\n".join([HEADER, *(row for row, _ in ROWS)]) + "\n")
    return file


@pytest.fixture
def accounts_file(tmp_path: Path) -> Path:
    """The accounts that bank A knows."""
    file = tmp_path / "accounts.csv"
    file.write_text(ACCOUNTS)
    return file


@pytest.fixture
def demo(server: ServerLike, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Demo:
    """A function that runs the demo with these options; its report is read in both forms, for each run takes long."""
    monkeypatch.setenv(URL_VARIABLE, server.url("postgres"))
    reports: list[Report] = []

    def remembered(*arguments: Any, **more: Any) -> Report:
        reports.append(Report(*arguments, **more))
        return reports[-1]

    monkeypatch.setattr(demo_module, "Report", remembered)
    # Each process of the banks would import for a second; a run has seven, and each kill starts another one.
    monkeypatch.setattr(processes, "subprocess", FORKING)

    def run_demo(before_audit: Callable[[Banks], None] | None = None, **options: Any) -> Ran:
        # A Spark session takes longer to start than most of these runs; the tests that want one say so.
        code = run(DemoOptions(**{"engine": EngineName.LOCAL, **options}), before_audit=before_audit)
        shown = capsys.readouterr()
        return Ran(code, json.loads(reports[-1].as_json()), shown.out, shown.err)

    return run_demo


@pytest.fixture
def bank(new_engine: Callable[..., Engine]) -> Iterator[Engine]:
    """Bank A with one account, number 7, that has 100.00."""
    engine = new_engine()
    bank_a.Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(bank_a.Account(id=7, balance=Decimal("100.00")))
    with rebound((bank_a.outbox, engine)):
        yield engine
