"""Measures that can't be computed: refused before anything is read, or told without a crash."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from outbox.errors import InvalidSettings, ReconcileError, SourceError
from outbox.reconcile.job import Pair, Window
from outbox.reconcile.measure import Measure
from outbox.reconcile.measure.compute import Compared, check_measures, measure_all
from tests.reconcile.books import IN_FLIGHT, OF_PAIR, PAIR, SUM, Books, money


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "my money"}, "measure 'my money': a name begins with a letter and has letters, digits, _ and - only"),
        ({"name": ""}, "a name begins with a letter"),
        ({"by": "account"}, "by = 'account' must be a tuple; write ('account',)"),
        ({"by": ("an account",)}, "'an account' is no name of a column; use letters, digits and _"),
        ({"by": ('x"; DROP TABLE debit; --',)}, "is no name of a column"),
        ({"values": ()}, "no values; name at least one column to add up"),
        ({"values": ("amount", "account")}, "account is named twice among by and values"),
        ({"in_flight": {"account": "a", "currency": "c", "transfers": "*"}}, "in_flight lacks amount; give its path"),
        ({"in_flight": IN_FLIGHT | {"day": "day"}}, "in_flight has day, which is neither in by nor in values"),
        ({"in_flight": IN_FLIGHT | {"amount": "a..b"}}, "in_flight.amount = 'a..b' is no path"),
        ({"in_flight": IN_FLIGHT | {"account": "*"}}, "in_flight.account = '*' counts messages, and account is a part"),
        (
            {"in_flight": {}, "producer": None},
            "in_flight must say where they have account, currency, transfers, amount",
        ),
        ({"consumer": "DELETE FROM credit"}, "consumer must be a single SELECT (or WITH … SELECT), not 'DELETE FROM"),
        ({"consumer": ""}, "consumer must be a single SELECT"),
        ({"producer": "SELECT 1; DELETE FROM debit"}, "producer must be a single SELECT; leave out the semicolon"),
        ({"rolled_back": "/* SELECT */ UPDATE debit SET amount = 0"}, "rolled_back must be a single SELECT"),
    ],
)
def test_a_declaration_that_cant_work_is_refused(changes: dict[str, Any], why: str) -> None:
    """The error names the measure, what is wrong with it, and the mend."""
    with pytest.raises(InvalidSettings) as refused:
        money(**changes)
    assert str(refused.value).startswith("measure ")
    assert why in str(refused.value)


@pytest.mark.parametrize(
    "sql",
    [
        "  select 1 as n",
        "-- what is paid; and when\nSELECT 1 AS n -- ;",
        "/* a; b */ WITH x AS (SELECT 1 AS n) SELECT n FROM x",
        "(SELECT 1 AS n) UNION ALL (SELECT 2)",
        "SELECT count(*) AS n FROM debit WHERE account IN (';', $$;$$, $q$;'$q$, E'\\';', 'it''s;', \";\")",
        "VALUES (1)",
    ],
)
def test_a_semicolon_that_ends_nothing_is_no_reason_to_refuse(sql: str) -> None:
    """Comments, literals and quoted names may have one."""
    assert Measure("n", *OF_PAIR, (), ("n",), sql, producer=sql).consumer == sql


def _sum_of(expression: str) -> str:
    return SUM.format("credit").replace("sum(amount)", expression)


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        (
            "SELECT account, 'EUR' AS currency, 1 AS transfers FROM credit",
            "lacks amount; it returns account, currency, transfers",
        ),
        (
            SUM.format("credit").replace(" FROM", ", now() AS day FROM"),
            "returns day, which is neither in by nor in values; leave it out",
        ),
        (
            _sum_of("sum(amount)::float8"),
            "returns amount as double precision, which can't be added up exactly; write amount::numeric",
        ),
        (_sum_of("sum(amount)::real"), "returns amount as real"),
        (_sum_of("sum(amount)::text"), "returns amount as text"),
        (_sum_of("sum(amount)::money"), "returns amount as money"),
        (SUM.format("nowhere"), 'failed: relation "nowhere" does not exist'),
        (_sum_of("x y z"), "failed: syntax error"),
        (SUM.format("credit WHERE at > :begin"), "has :begin; only :since, :until, :first, :last are bound"),
        ("SELECT account, account, currency, 1 AS transfers, amount FROM credit", "returns account twice"),
        (
            "WITH gone AS (DELETE FROM credit RETURNING *) SELECT account, currency, 1 AS transfers, amount FROM gone",
            "failed: WITH clause containing a data-modifying statement must be at the top level",
        ),
    ],
)
def test_a_select_that_returns_something_else_is_refused_before_anything_is_read(
    books: Books, sql: str, why: str
) -> None:
    """Columns and types are seen before the comparison begins; the error names them and the mend."""
    with books.snapshots() as connections, pytest.raises(InvalidSettings) as refused:
        check_measures([money(consumer=sql)], [PAIR], *connections, Window())
    assert str(refused.value).startswith(f"measure 'money': its consumer SELECT {why}")


def test_a_measure_of_a_pair_that_isnt_compared_is_refused(books: Books) -> None:
    """What is under way is known of compared pairs only."""
    with (
        books.snapshots() as connections,
        pytest.raises(InvalidSettings, match="transfer → bank, which isn't compared"),
    ):
        check_measures([money()], [Pair("transfer", "other")], *connections, Window())


def test_a_select_that_would_write_is_stopped_by_the_transaction(books: Books) -> None:
    """A function with a side effect fails in a transaction that is read only."""
    books.run(
        books.consumer, "CREATE OR REPLACE FUNCTION spend() RETURNS int LANGUAGE sql AS 'DELETE FROM credit; SELECT 1'"
    )
    measure = Measure("m", *OF_PAIR, (), ("n",), "SELECT spend() AS n", producer="SELECT 1 AS n")
    with pytest.raises(ReconcileError, match="cannot execute DELETE in a read-only transaction"):
        books.measure(measure)


def test_a_select_that_takes_too_long_is_stopped(books: Books) -> None:
    """The limit is named, with what can be done; the transaction stays usable."""
    slow = Measure("slow", *OF_PAIR, (), ("n",), "SELECT 1 AS n FROM pg_sleep(60)", producer="SELECT 1 AS n")
    with books.snapshots() as (producer, consumer):
        with pytest.raises(ReconcileError, match="measure 'slow': its consumer SELECT failed: it took longer than 0"):
            measure_all([slow], [Compared(PAIR, [])], producer, consumer, Window(), seconds=0.2)
        assert consumer.scalar(text("SELECT 1")) == 1


def test_a_database_that_goes_away_is_named_without_its_password(books: Books) -> None:
    """A lost connection is a source that can't be read."""
    with books.snapshots() as (producer, consumer):
        pid = consumer.scalar(text("SELECT pg_backend_pid()"))
        books.run(books.producer, "SELECT pg_terminate_backend(:pid, 10000)", pid=pid)
        with pytest.raises(SourceError, match="measure 'money': the consumer's database is lost"):
            measure_all([money()], [Compared(PAIR, [])], producer, consumer, Window())


def test_numbers_that_cant_be_added_up_are_told(books: Books) -> None:
    """NaN and infinity in a table neither crash the measure nor pass for nothing."""
    books.credit([books.transfer("A", "1.00")])
    books.run(books.producer, "INSERT INTO debit (account, currency, amount) VALUES ('A', 'EUR', 'NaN')")
    (result,) = books.measure(money())
    assert result.faults == ("producer: NaN under the key ('A', 'EUR') can't be added up; mend the row that has it",)
    assert not result.in_sync
