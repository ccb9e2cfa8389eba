"""The bank transfer from end to end, on real processes and databases."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, delete, func, insert, select, text, update
from sqlalchemy.orm import DeclarativeBase

from examples.bank_transfer import bank_a, bank_b
from examples.bank_transfer.demo import DemoOptions, run
from examples.bank_transfer.opening import Banks
from tests.examples.conftest import GOOD_IDS, HEADER, ORDERS_BALANCE, REFUSED, Demo


def test_every_transfer_arrives_and_the_sums_are_equal(demo: Demo) -> None:
    """A plain run: as many transfers, messages and inbox rows as orders, nothing in flight, the same money."""
    code, report = demo(transfers=200)
    assert (code, report["faults"]) == (0, [])
    assert report["orders"] == report["transfers"] == report["messages"] == report["inbox_rows"] == 200
    assert (report["in_flight"], report["parked"], report["kills"], report["refused"]) == (0, [], {}, [])
    before, after = report["money"]["before"], report["money"]["after"]
    assert before["total"] == after["total"] == before["bank_a"]
    assert Decimal(after["bank_b"]) > 0 == Decimal(before["bank_b"])


def test_bad_rows_are_reported_by_line_and_leave_no_trace(
    demo: Demo, orders_file: Path, accounts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each bad row is refused with its reason; neither database has anything of it."""
    traces: list[set[int | None]] = []
    opened: set[str] = set()

    def look(banks: Banks) -> None:
        with banks.a.connect() as a, banks.b.connect() as b:
            traces.append(set(a.scalars(select(bank_a.Transfer.id))))
            traces.append({row["transfer_id"] for row in _bodies(a)})
            traces.append(set(a.scalars(select(bank_a.LedgerEntry.transfer_id))) - {None})
            traces.append(set(b.scalars(select(bank_b.LedgerEntry.transfer_id))))
            opened.update(b.scalars(select(bank_b.Account.id)))

    code, report = demo(look, orders=orders_file, accounts=accounts_file, opening_balance=Decimal(ORDERS_BALANCE))
    assert (code, report["faults"]) == (0, [])
    assert [(row["line"], row["reason"]) for row in report["refused"]] == REFUSED
    assert traces == [GOOD_IDS] * 4
    assert opened == {"AB-71000001", "CD-71000002", "AB-71000003", "EF-71000004"}
    assert report["transfers"] == report["inbox_rows"] == len(GOOD_IDS)


def test_refused_orders_are_told_on_stderr_and_strict_makes_them_an_error(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line that an editor could jump to, and exit code 1."""
    file = tmp_path / "orders.csv"
    file.write_text(f"{HEADER}\n1;1;AB;12;5.00;\n2;1;AB;12;nothing;\n")
    code = run(DemoOptions(orders=file, strict=True))
    shown = capsys.readouterr()
    assert code == 1
    assert f"{file}:3: amount 'nothing' is not a number" in shown.err
    assert "1 order refused, which --strict makes an error" in shown.err
    assert "Settled: 1 transfer, and not a cent is missing." in shown.out


def test_a_transfer_to_no_account_is_parked_and_its_money_accounted_for(demo: Demo, tmp_path: Path) -> None:
    """Bank B has no such account: the message waits for a human, and the sums say where the money is."""
    file = tmp_path / "orders.csv"
    file.write_text(f"{HEADER}\n1;1;AB;12;5.00;\n2;1;AB;no such account;7.25;\n")
    code, report = demo(orders=file)
    assert (code, report["faults"], report["in_flight"]) == (0, [], 0)
    assert report["parked"] == [{"transfer": 2, "amount": "7.25", "reason": "no account AB-no such account at bank B"}]
    assert report["money"]["after"]["parked"] == "7.25"
    assert report["money"]["after"]["bank_b"] == "5.00"


def test_processes_killed_at_random_lose_and_double_nothing(demo: Demo) -> None:
    """SIGKILL of tellers, dispatchers and consumers while they work: the sums are exact."""
    code, report = demo(transfers=600, kills=12, seed=3)
    assert (code, report["faults"]) == (0, [])
    assert sum(report["kills"].values()) == 12
    assert sum(report["restarts"].values()) >= 12
    assert report["transfers"] == report["messages"] == report["inbox_rows"] == 600
    assert report["money"]["before"]["total"] == report["money"]["after"]["total"]


def _without(table: type[DeclarativeBase]) -> Callable[[Connection], Any]:
    key: Any = table.__table__.c.id
    last = select(func.max(key)).scalar_subquery()
    return lambda connection: connection.execute(delete(table).where(key == last))


def _cent(table: type[bank_a.Account] | type[bank_b.Account]) -> Callable[[Connection], Any]:
    richest = select(func.max(table.id)).scalar_subquery()
    change = update(table).where(table.id == richest).values(balance=table.balance + Decimal("0.01"))
    return lambda connection: connection.execute(change)


def _credit_twice(connection: Connection) -> None:
    entry = bank_b.LedgerEntry
    once = select(entry.account_id, entry.transfer_id, entry.amount).where(
        entry.id == select(func.max(entry.id)).scalar_subquery()
    )
    account, _, amount = connection.execute(once).one()
    connection.execute(insert(entry).from_select(["account_id", "transfer_id", "amount"], once))
    connection.execute(
        update(bank_b.Account).where(bank_b.Account.id == account).values(balance=bank_b.Account.balance + amount)
    )


def _without_inbox_row(connection: Connection) -> None:
    connection.execute(
        text(
            "DELETE FROM outbox.consumer_message "
            "WHERE message_id = (SELECT message_id FROM outbox.consumer_message LIMIT 1)"
        )
    )


@pytest.mark.parametrize(
    ("bank", "theft", "finding"),
    [
        ("a", _without(bank_a.LedgerEntry), "1 transfer without a debit"),
        ("b", _without(bank_b.LedgerEntry), "1 transfer in flight"),
        ("a", _cent(bank_a.Account), "0.01 is too much"),
        ("b", _cent(bank_b.Account), "but its ledger adds up to"),
        ("b", _credit_twice, "1 transfer with more than one credit"),
        ("b", _without_inbox_row, "29 inbox rows, but 30 halves with a message"),
    ],
    ids=["debit-gone", "credit-gone", "cent-at-a", "cent-at-b", "credited-twice", "inbox-row-gone"],
)
def test_the_auditor_finds_what_a_thief_did(
    demo: Demo, bank: str, theft: Callable[[Connection], Any], finding: str
) -> None:
    """Whatever is changed behind the banks' back between the last transfer and the audit is found and told."""

    def steal(banks: Banks) -> None:
        with getattr(banks, bank).begin() as connection:
            theft(connection)

    code, report = demo(steal, transfers=30, producers=1, consumers=1)
    assert code == 1
    assert not report["ok"]
    assert any(finding in fault for fault in report["faults"]), report["faults"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"producers": 0}, "producers = 0 must be between 1 and 64"),
        ({"transfers": 0}, "transfers = 0"),
        ({"kills": -1}, "kills = -1"),
        ({"opening_balance": Decimal("0.001")}, "at most 2 decimals"),
        ({"opening_balance": Decimal("NaN")}, "opening_balance = NaN"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    """One error that names the option and its bounds."""
    with pytest.raises(ValueError, match=message):
        DemoOptions(**options)


def test_an_orders_file_of_no_use_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line, before any database is started."""
    assert run(DemoOptions(orders=tmp_path / "none.csv")) == 2
    assert capsys.readouterr().err == f"orders file {tmp_path / 'none.csv'}: No such file or directory\n"


def _bodies(connection: Connection) -> list[dict[str, Any]]:
    rows = connection.scalars(text("SELECT convert_from(body, 'UTF8')::json FROM outbox.half_message"))
    return list(rows)
