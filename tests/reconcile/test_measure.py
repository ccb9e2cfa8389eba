"""Business measures that add up, or don't: to the last digit, by key, explained by what is under way."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from io import StringIO
from uuid import UUID

import pyarrow as pa
import pytest
from rich.console import Console
from sqlalchemy import text

from outbox.embedded import ServerLike
from outbox.errors import InvalidSettings
from outbox.message.ids import uuid7_at
from outbox.message.model import uuid7
from outbox.reconcile.config import access_of
from outbox.reconcile.job import Job, Outcome, Window
from outbox.reconcile.measure import Measure
from outbox.reconcile.measure.compute import Compared, in_transit, measure_all
from outbox.reconcile.measure.result import MeasureRow
from outbox.reconcile.report import as_json, print_report
from outbox.reconcile.rows import FINDING, JobResult
from outbox.reconcile.run import reconcile
from outbox.reconcile.tables import InboxState, ProducerState
from tests.reconcile.books import OF_PAIR, PAIR, SUM, Books, at, money, row


def test_books_that_agree_add_up_by_key_and_value(books: Books) -> None:
    """What was debited and credited is in the result under each key, and nothing is unexplained."""
    ids = [books.transfer("A", "10.10"), books.transfer("A", "0.20"), books.transfer("B", "5.00", "USD")]
    books.dispatch()
    books.credit(ids)
    (result,) = books.measure(money())
    assert result.in_sync
    assert not result.faults
    told: list[object] = [(row.key, row.value, row.producer, row.consumer, row.in_flight) for row in result.rows]
    assert told == [
        (("A", "EUR"), "transfers", 2, 2, 0),
        (("A", "EUR"), "amount", Decimal("10.30"), Decimal("10.30"), 0),
        (("B", "USD"), "transfers", 1, 1, 0),
        (("B", "USD"), "amount", Decimal("5.00"), Decimal("5.00"), 0),
    ]


def test_one_cent_is_found_and_located(books: Books) -> None:
    """A cent that went astray among a hundred transfers is told, under the key where it is missing."""
    ids = [books.transfer(f"A{n % 7}", f"{n * 7919}.{n:02}") for n in range(100)]
    books.credit(ids)
    books.run(books.consumer, "UPDATE credit SET amount = amount - 0.01 WHERE message_id = :id", id=ids[17])
    (result,) = books.measure(money())
    assert [(row.key, row.value, row.unexplained) for row in result.unexplained] == [
        (("A3", "EUR"), "amount", Decimal("0.01"))
    ]
    assert not result.in_sync


def test_sums_are_exact_beyond_the_digits_of_a_default_context(books: Books) -> None:
    """40 digits before the point and 20 after it lose none, neither in a difference nor in a total."""
    large = "9" * 40 + "." + "0" * 19 + "1"
    ids = [books.transfer("A", large), books.transfer("A", "0.1"), books.transfer("B", large)]
    books.credit(ids[1:])
    (result,) = books.measure(money(), ids=[])
    assert row(result, "A", "EUR").unexplained == Decimal(large)
    total = next(total for total in result.totals if total.value == "amount")
    assert str(total.producer) == "1" + "9" * 39 + "8." + "1" + "0" * 18 + "2"
    assert str(total.unexplained) == large


@pytest.mark.parametrize("status", ["failed", "parked", "quarantined", None])
def test_what_is_under_way_is_explained_by_the_body(books: Books, status: str | None) -> None:
    """A transfer that the consumer doesn't know, failed at, or set aside counts with what its body carries."""
    arrived, waiting = books.transfer("A", "10.00"), books.transfer("A", "0.33")
    books.dispatch()
    books.credit([arrived])
    if status:
        books.credit([waiting], status=status, booked=False)
    (result,) = books.measure(money())
    assert row(result, "A", "EUR").in_flight == Decimal("0.33")
    assert row(result, "A", "EUR", value="transfers").in_flight == 1
    assert result.in_sync


def test_undispatched_and_scheduled_messages_are_under_way(books: Books) -> None:
    """Neither an op that became no message yet nor a message for tomorrow is missing money."""
    books.transfer("A", "1.00")
    books.transfer("B", "2.00", delay=86400)
    books.dispatch()
    books.transfer("C", "4.00")
    (result,) = books.measure(money())
    assert {row.key[0]: row.in_flight for row in result.rows if row.value == "amount"} == {"A": 1, "B": 2, "C": 4}
    assert result.in_sync


def test_what_was_rolled_back_is_taken_off(books: Books) -> None:
    """A debit whose message was rolled back adds up with what ``rolled_back`` tells of it, and not without."""
    books.credit([books.transfer("A", "10.00")])
    books.refuse("A", "3.00")
    with_it, without = books.measure(money(rolled_back=SUM.format("refused")), money(name="short"))
    assert row(with_it, "A", "EUR").rolled_back == 3
    assert with_it.in_sync
    assert [row.unexplained for row in without.unexplained] == [1, 3]


def test_what_has_expired_is_unexplained_until_the_producer_takes_it_back(books: Books) -> None:
    """No message will bring its effect any more, so it isn't under way."""
    arrived, expired = books.transfer("A", "10.00"), books.transfer("A", "0.33")
    books.dispatch()
    books.credit([arrived])
    books.credit([expired], status="expired", booked=False)
    (result,) = books.measure(money(rolled_back=SUM.format("refused")))
    assert not row(result, "A", "EUR").in_flight
    assert row(result, "A", "EUR").unexplained == Decimal("0.33")

    taken_back = "INSERT INTO refused SELECT * FROM debit WHERE message_id = :id"
    books.run(books.producer, taken_back, id=expired)
    (result,) = books.measure(money(rolled_back=SUM.format("refused")))
    assert result.in_sync


def test_an_effect_without_a_debit_stays_unexplained(books: Books) -> None:
    """A credit of a rolled-back transfer, a phantom, and a second credit each show as money too much."""
    rolled_back, twice = books.refuse("R", "1.00"), books.transfer("T", "2.00")
    books.credit([rolled_back, twice])
    books.run(books.producer, "DELETE FROM debit WHERE message_id = :id", id=rolled_back)
    books.run(books.consumer, "INSERT INTO credit SELECT * FROM credit WHERE message_id = :id", id=twice)
    with books.consumer.begin() as connection:
        books.inbox(connection, phantom := uuid7(), "consumed")
    books.run(
        books.consumer,
        "INSERT INTO credit (message_id, account, currency, amount) VALUES (:id, 'P', 'EUR', 4)",
        id=phantom,
    )
    (result,) = books.measure(money())
    assert {row.key[0]: row.unexplained for row in result.unexplained if row.value == "amount"} == {
        "P": -4,
        "R": -1,
        "T": -2,
    }


def test_rows_of_one_key_are_added_up_and_null_is_a_key(books: Books) -> None:
    """Without GROUP BY rows are added up; NULL is a key of its own on every side; a NULL value is 0."""
    bare = "SELECT account, currency, 1 AS transfers, amount FROM {}"
    ids = [books.transfer(None, "1.50"), books.transfer(None, "2.50"), books.transfer("A", None, None)]
    books.credit([ids[0]])
    (result,) = books.measure(money(producer=bare.format("debit"), consumer=bare.format("credit")), ids=[ids[1]])
    assert [row(result, None, "EUR").producer, row(result, None, "EUR").in_flight] == [4, Decimal("2.50")]
    assert not row(result, None, "EUR").unexplained
    assert row(result, "A", None).producer == 0
    assert row(result, "A", None, value="transfers").unexplained == 1


def test_the_text_null_is_not_null(books: Books) -> None:
    """What is booked without an account doesn't make up for what an account called NULL lacks; both are told apart."""
    nobody, somebody = books.transfer(None, "5.00"), books.transfer("NULL", "5.00")
    books.credit([nobody, somebody])
    books.run(books.consumer, "UPDATE credit SET account = NULL WHERE message_id = :id", id=somebody)
    (result,) = books.measure(money(), ids=[])
    assert row(result, None, "EUR").unexplained == -5
    assert row(result, "NULL", "EUR").unexplained == 5
    (waiting,) = books.measure(money(), ids=[nobody, somebody])
    assert row(waiting, None, "EUR").in_flight == 5
    assert row(waiting, "NULL", "EUR").in_flight == 5
    job = JobResult(dt.datetime.now(dt.UTC), [], [result])
    print_report(job, Console(file=(told := StringIO()), width=200))
    shown = told.getvalue()
    assert "NULL, EUR" in shown
    assert '"NULL", EUR' in shown
    keys = [each["key"] for each in as_json(job)["measures"][0]["rows"]]
    assert [None, "EUR"] in keys
    assert ["NULL", "EUR"] in keys


@pytest.mark.parametrize("account", ["account::int", "account::numeric(9, 2)", "account::float8", "account"])
def test_keys_that_are_numbers_compare_as_numbers(books: Books, account: str) -> None:
    """Where one side's column is of a number, 7 is 7.00, whatever the others and the bodies write."""
    ids = [books.transfer("7", "1.00"), books.transfer("1200", "2.00"), books.transfer("-0", "4.00")]
    books.credit(ids[:2])
    sums = "SELECT {} AS account, currency, 1 AS transfers, amount FROM {}"
    selects = {"producer": sums.format(account, "debit"), "consumer": sums.format("account::numeric(9, 3)", "credit")}
    (result,) = books.measure(money(**selects))
    assert result.in_sync
    assert {each.key[0] for each in result.rows} == {"7", "1200", "0"}
    (bodies,) = books.measure(money(producer=None, consumer=selects["consumer"]))
    assert bodies.in_sync


def test_without_a_key_there_is_one_row(books: Books) -> None:
    """A measure of totals has the empty key, also where there is nothing to add up."""
    total = money(
        by=(),
        values=("amount",),
        producer="SELECT sum(amount) AS amount FROM debit",
        consumer="SELECT sum(amount) AS amount FROM credit",
        in_flight={"amount": "amount"},
    )
    (result,) = books.measure(total)
    assert result.rows == (MeasureRow((), "amount", *[Decimal()] * 4),)
    books.transfer("A", "1.00")
    (result,) = books.measure(total)
    assert result.rows == (MeasureRow((), "amount", Decimal("1.00"), Decimal(), Decimal(), Decimal("1.00")),)


def test_keys_compare_as_text_however_the_databases_are_configured(books: Books, server: ServerLike) -> None:
    """Days and instants are the same text under two time zones and two date styles."""
    by_day = "SELECT at::date AS day, at, sum(amount) AS amount FROM {} GROUP BY 1, 2"
    books.credit([books.transfer("A", "1.00")])
    for engine, table in ((books.producer, "debit"), (books.consumer, "credit")):
        books.run(engine, f"UPDATE {table} SET at = '2026-03-01 23:30+00'")
    name = books.consumer.url.database
    books.run(books.consumer, f"ALTER DATABASE \"{name}\" SET TimeZone = 'Asia/Tokyo'")
    books.run(books.consumer, f"ALTER DATABASE \"{name}\" SET DateStyle = 'German'")
    books.consumer.dispose()
    try:
        (result,) = books.measure(
            Measure(
                "days", *OF_PAIR, ("day", "at"), ("amount",), by_day.format("credit"), producer=by_day.format("debit")
            )
        )
    finally:
        books.run(books.consumer, f'ALTER DATABASE "{name}" RESET ALL')
        books.consumer.dispose()
    assert [row.key for row in result.rows] == [("2026-03-01", "2026-03-01 23:30:00+00")]
    assert result.in_sync


def test_the_window_is_bound(books: Books) -> None:
    """The statements can bind the window's times, and the first and last id that it can hold."""
    old, edge, new = (_id(f"2026-03-0{day}") for day in (1, 2, 3))
    for id_, amount in ((old, 1), (edge, 2), (new, 4)):
        books.run(
            books.producer,
            "INSERT INTO debit VALUES (:id, 'A', 'EUR', :amount, :at)",
            id=id_,
            amount=amount,
            at=at(id_),
        )
    window = Window(at(edge), at(new))
    by_id = "SELECT sum(amount) AS amount FROM debit WHERE message_id BETWEEN :first AND :last"
    by_time = """SELECT sum(amount) AS amount FROM debit
                  WHERE (:since IS NULL OR at >= :since) AND (:until IS NULL OR at < :until)"""
    nothing = "SELECT 0 AS amount"
    for sql in (by_id, by_time):
        measure = Measure("m", *OF_PAIR, (), ("amount",), nothing, producer=sql)
        for chosen, expected in ((window, 2), (Window(), 7), (Window(until=at(new)), 3), (Window(since=at(edge)), 6)):
            assert books.measure(measure, window=chosen)[0].rows[0].producer == expected


def test_the_snapshots_of_the_comparison_are_what_is_measured(books: Books) -> None:
    """What is booked after the snapshots were taken isn't seen, though the statements run later."""
    books.credit([books.transfer("A", "1.00")])
    with books.snapshots() as (producer, consumer):
        books.credit([books.transfer("A", "5.00")])
        (result,) = measure_all([money()], [Compared(PAIR, [])], producer, consumer, Window())
    assert row(result, "A", "EUR").producer == row(result, "A", "EUR").consumer == 1


def test_the_callers_transactions_stay_as_they_were(books: Books) -> None:
    """Measures leave no setting behind, and one that fails leaves the transactions usable."""
    names = ("statement_timeout", "TimeZone", "DateStyle", "enable_seqscan")
    with books.snapshots() as connections:
        before = [[c.scalar(text(f"SHOW {name}")) for name in names] for c in connections]
        measure_all([money()], [Compared(PAIR, [uuid7()])], *connections, Window())
        with pytest.raises(InvalidSettings):
            measure_all([money(consumer="SELECT * FROM nowhere")], [Compared(PAIR, [])], *connections, Window())
        assert [[c.scalar(text(f"SHOW {name}")) for name in names] for c in connections] == before


def test_a_job_computes_its_measures_with_what_it_found(books: Books) -> None:
    """Compared end to end: what is missing counts as under way, and a cent too much leaves the job out of sync."""
    ids = [books.transfer("A", "1.00"), books.transfer("A", "2.00")]
    books.dispatch()
    books.credit(ids[:1])
    access = [
        access_of(engine.url.render_as_string(hide_password=False)) for engine in (books.producer, books.consumer)
    ]
    job = Job(access[0], access[1], (PAIR,), measures=(money(), money(name="bodies", producer=None)), record=False)
    result = reconcile(job)
    assert [row(measure, "A", "EUR").in_flight for measure in result.measures] == [2, 2]
    assert result.in_sync
    books.run(books.consumer, "UPDATE credit SET amount = amount + 0.01")
    result = reconcile(job)
    assert [row.unexplained for measure in result.measures for row in measure.unexplained] == [Decimal("-0.01")] * 2
    assert not result.in_sync


def _id(day: str) -> UUID:
    return uuid7_at(dt.datetime.fromisoformat(f"{day}T00:00+00:00").timestamp())


@pytest.mark.parametrize(
    ("outcome", "state", "compensated", "status", "effects", "expected"),
    [
        (Outcome.MISSING, "DISPATCHED", False, None, None, True),
        (Outcome.UNCONSUMED, "DISPATCHED", False, None, None, True),
        (Outcome.RESEND_EXHAUSTED, "DISPATCHED", False, None, None, True),
        (Outcome.UNDISPATCHED, "COMMITTED", False, None, None, True),
        (Outcome.UNDISPATCHED, "SCHEDULED", False, None, None, True),
        (Outcome.IN_FLIGHT, "SCHEDULED", False, None, None, True),
        (Outcome.IN_FLIGHT, "UNDECIDED", False, None, None, False),
        (Outcome.UNDECIDED, "UNDECIDED", False, None, None, False),
        (Outcome.FAILED, "DISPATCHED", False, "FAILED", -1, True),
        (Outcome.PARKED, "DISPATCHED", False, "PARKED", 0, True),
        (Outcome.UNCOMPENSATED, "DISPATCHED", False, "QUARANTINED", -1, True),
        (Outcome.STATUS_MISMATCH, "DISPATCHED", False, "FAILED", 1, False),
        (Outcome.STATUS_MISMATCH, "DISPATCHED", True, None, None, False),
        (Outcome.UNRECORDED, "DISPATCHED", False, "NONE", 1, False),
        (Outcome.NO_EFFECT, "DISPATCHED", False, "CONSUMED", 0, False),
        (Outcome.DIGEST_MISMATCH, "DISPATCHED", False, "CONSUMED", -1, False),
        (Outcome.DIGEST_MISMATCH, "DISPATCHED", False, "PARKED", -1, True),
        (Outcome.DUPLICATE_EFFECT, "DISPATCHED", False, "CONSUMED", 2, False),
        (Outcome.PHANTOM, None, None, "CONSUMED", -1, False),
        (Outcome.PHANTOM, None, None, "PARKED", -1, False),
        (Outcome.CONSUMED_THOUGH_ROLLED_BACK, "ROLLED_BACK", False, "CONSUMED", -1, False),
        (Outcome.CONSUMED_THOUGH_ROLLED_BACK, "DISPATCHED", True, "CONSUMED", -1, False),
        (Outcome.STATUS_MISMATCH, "RECALLED", False, "FAILED", -1, False),
    ],
)
def test_what_is_under_way(
    outcome: Outcome,
    state: str | None,
    compensated: bool | None,
    status: str | None,
    effects: int | None,
    expected: bool,
) -> None:
    """What both sides say of a message decides whether it is booked at the producer and not at the consumer."""
    finding = {
        "id": (id_ := uuid7()).bytes,
        "outcome": int(outcome),
        "state": None if state is None else int(ProducerState[state]),
        "compensated": compensated,
        "status": None if status is None else int(InboxState[status]),
        "effects": effects,
    }
    table = pa.Table.from_pylist([finding], schema=FINDING)
    assert in_transit(table, FINDING.empty_table(), table) == ([id_, id_] if expected else [])
