"""Reading and generating payment orders."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from examples.bank_transfer.banks import read_accounts
from examples.bank_transfer.orders import Order, OrdersUnreadable, Refusal, generate_orders, read_orders
from examples.bank_transfer.source import Source, survey
from tests.examples.conftest import HEADER, REFUSED


def test_rows_that_are_no_orders_are_refused_with_line_and_reason(orders_file: Path) -> None:
    """What can be seen in the file alone is refused by the reader; the rest is for bank A to refuse."""
    refused = [(row.line, row.reason) for row in read_orders(orders_file) if isinstance(row, Refusal)]
    at_the_bank = ("no account", "insufficient funds")
    assert refused == [(line, reason) for line, reason in REFUSED if not reason.startswith(at_the_bank)]


def test_a_good_row_is_read_exactly(orders_file: Path) -> None:
    """Quotes go, the amount is a decimal of two places, the line is that of the file."""
    first = next(iter(read_orders(orders_file)))
    assert first == Order(2, 901, 1, "AB", "71000001", Decimal("400.00"), "RENT")
    assert first.receiver == "AB-71000001"


def test_columns_may_stand_in_any_order_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    """The header says which column is which, further ones are ignored; a byte order mark is no part of it."""
    file = tmp_path / "orders.csv"
    file.write_text(
        "\ufeffamount;order_id;note;account_id;account_to;bank_to;k_symbol\r\n\r\n2.5;7;hi;3;12;XY;\r\n",
        encoding="utf-8",
        newline="",
    )
    assert list(read_orders(file)) == [Order(3, 7, 3, "XY", "12", Decimal("2.50"), "")]


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    """Bytes that aren't UTF-8, and a NUL, which PostgreSQL can't store, spoil their own line only."""
    file = tmp_path / "orders.csv"
    file.write_bytes(f"{HEADER}\n1;1;AB;12;1;\xe9\n2;1;AB;1\x002;1;\n3;1;AB;12;1;\n".encode("latin-1"))
    kinds = [type(row) for row in read_orders(file)]
    assert kinds == [Refusal, Refusal, Order]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER.replace('"amount";', ""), "no column amount in its first line"),
        ("", "no column order_id, account_id, bank_to, account_to, amount, k_symbol"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_of_no_use_is_refused_as_a_whole(tmp_path: Path, content: str | None, message: str) -> None:
    """A missing file, an empty one, or one without a needed column gives one error that names the file."""
    file = tmp_path / "orders.csv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(OrdersUnreadable, match=message) as raised:
        list(read_orders(file))
    assert str(file) in str(raised.value)


def test_a_folder_is_no_orders_file(tmp_path: Path) -> None:
    """Only regular files can be read by several processes, again and again."""
    with pytest.raises(OrdersUnreadable, match="not a regular file"):
        list(read_orders(tmp_path))


def test_generated_orders_depend_on_the_seed_alone() -> None:
    """Every process that generates them gets the same orders."""
    assert list(generate_orders(50, 7)) == list(generate_orders(50, 7))
    assert list(generate_orders(50, 7)) != list(generate_orders(50, 8))


def test_the_shares_of_the_tellers_are_the_orders_cut_by_account() -> None:
    """Every order is in exactly one share, and an account's orders are all in the same one, in order."""
    source = Source(None, 200, 3)
    shares = [list(source.share(teller, 3)) for teller in range(3)]
    assert sorted((order for share in shares for order in share), key=lambda order: order.id) == list(source)
    assert not set.intersection(*({order.account_id for order in share} for share in shares))
    assert [len(share) for share in shares] == [survey(source, 3).shares[teller] for teller in range(3)]


def test_opening_balances_cover_all_orders_of_an_account() -> None:
    """The sum of its orders, rounded up to full thousands."""
    source = Source(None, 200, 3)
    seen = survey(source, 1)
    for account in {order.account_id for order in source.share(0, 1)}:
        needs = sum(order.amount for order in source.share(0, 1) if order.account_id == account)
        assert 0 <= seen.opening_balance(account) - needs < 1000
        assert seen.opening_balance(account) % 1000 == 0


def test_an_accounts_file_lists_ids_in_its_first_column(tmp_path: Path) -> None:
    """A plain list will do, and so will a table with a header; what is no id is named with its line."""
    file = tmp_path / "accounts.csv"
    file.write_text('"account_id";"district"\n"3";"12"\n4;1\n\n')
    assert read_accounts(file) == {3, 4}
    file.write_text("3\nfour\n")
    with pytest.raises(OrdersUnreadable, match="line 2: 'four'"):
        read_accounts(file)
