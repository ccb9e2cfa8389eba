"""What the bodies of messages carry: added up by the database or one by one, and told where they can't be read."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sqlalchemy import text

from outbox import Outbox
from outbox.database.execute import Statement, execute
from outbox.errors import InvalidMessage
from outbox.message.content import JSON
from outbox.message.model import uuid7
from outbox.reconcile.job import Pair, Window
from outbox.reconcile.measure import Measure, compute
from outbox.reconcile.measure.compute import Compared, body_sums, carried, measure_all
from outbox.reconcile.measure.result import MeasureRow
from tests.kit import tries
from tests.reconcile.books import OF_PAIR, PAIR, Books, at, money, row


def test_bodies_stand_in_for_the_producers_books(books: Books) -> None:
    """Without a SELECT for the producer all committed messages of the window are summed, and nothing else."""
    ids = [books.transfer("A", "10.00"), books.transfer("A", "0.50"), books.transfer("B", "7.00", delay=86400)]
    books.transfer("A", "100.00", topic="other")
    books.refuse("A", "1000.00")
    with books.producer.begin() as connection:
        books.outbox.prepare(connection, PAIR.topic, {"to": {"account": "A"}, "currency": "EUR", "amount": "1"})
    recalled = books.transfer("A", "20.00", delay=86400)
    books.dispatch()
    books.outbox.operator.recall(recalled, by="me", why="test")
    compensated = books.transfer("A", "30.00")
    books.run(
        books.producer,
        "INSERT INTO outbox.compensation (half_id, function, requested_by, reason) VALUES (:id, 'f', 'me', 'test')",
        id=compensated,
    )
    books.credit(ids[:1])
    (result,) = books.measure(money(producer=None))
    assert {row.key[0]: (row.producer, row.in_flight) for row in result.rows if row.value == "amount"} == {
        "A": (Decimal("10.50"), Decimal("0.50")),
        "B": (7, 7),
    }
    assert result.in_sync


def test_bodies_that_arent_meant_for_the_group_dont_count(books: Books) -> None:
    """The filter of the group's subscription, and where the group began, bound what it has to book."""
    pair = Pair(PAIR.topic, PAIR.group, tags={"big"}, keys={"a*"})
    early = books.transfer("A", "1.00", tag="big", key="a1")
    books.dispatch()
    late = books.transfer("A", "2.00", tag="big", key="a1")
    books.transfer("A", "4.00", tag="small", key="a1")
    books.transfer("A", "8.00", tag="big", key="b")
    measure = money(producer=None)
    with books.producer.connect() as connection:
        queue, position = connection.execute(text("SELECT queue, position FROM outbox.message")).one()
    compared = Compared(pair, books.in_transit(pair), {queue: position})
    with books.snapshots() as connections:
        (result,) = measure_all([measure], [compared], *connections, Window())
    assert row(result, "A", "EUR").producer == 2
    assert {early, late} < set(compared.in_transit)
    assert row(result, "A", "EUR").in_flight == 3
    with books.snapshots() as connections:
        (result,) = measure_all([measure], [Compared(pair, [late])], *connections, Window())
    assert [row(result, "A", "EUR").producer, row(result, "A", "EUR").in_flight] == [3, 2]
    books.outbox.operator.resend([early], by="me", why="the group is to have it after all")
    with books.snapshots() as connections:
        (result,) = measure_all([measure], [compared], *connections, Window())
    assert [row(result, "A", "EUR").producer, row(result, "A", "EUR").in_flight] == [3, 3]


def test_bodies_are_summed_in_batches_of_the_window(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the window is cut into batches, each body in it counts once, and none outside of it."""
    ids = [books.transfer("A", f"{2**n}.00") for n in range(9)]
    window = Window(at(ids[1]), at(ids[-1]) + dt.timedelta(milliseconds=1))
    expected = sum(2**n for n, id_ in enumerate(ids) if id_ in window.range)
    for batch in (1, 2, 3, 8, 100):
        monkeypatch.setattr(compute, "BATCH", batch)
        (result,) = books.measure(money(producer=None), window=window)
        assert row(result, "A", "EUR").producer == expected
        assert row(result, "A", "EUR").in_flight == 2**9 - 1


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\xff\x00", "application/octet-stream"),
        ("just text", "text/plain"),
        ({"to": {"account": "A"}, "currency": "EUR"}, "it has no amount"),
        ({"to": {}, "currency": "EUR", "amount": "1"}, "it has no to.account"),
        ({"to": 3, "currency": "EUR", "amount": "1"}, "it has no to.account"),
        ({"to": {"account": ["A"]}, "currency": "EUR", "amount": "1"}, "its to.account is no text: \"['A']\""),
        ({"to": {"account": {"pin": 1}}, "currency": "EUR", "amount": "1"}, "its to.account is no text: ***"),
        ({"to": {"account": "A"}, "currency": "EUR", "amount": None}, "its amount is no number: 'None'"),
        ({"to": {"account": "A"}, "currency": "EUR", "amount": "1,50"}, "its amount is no number: '1,50'"),
        ({"to": {"account": "A"}, "currency": "EUR", "amount": "NaN"}, "its amount is no number: 'NaN'"),
        ({"to": {"account": "A"}, "currency": "EUR", "amount": True}, "its amount is no number: 'True'"),
        ({"to": {"account": "A"}, "currency": "EUR", "amount": "1e999999"}, "its amount is no number"),
    ],
)
def test_a_body_that_cant_be_read_is_told_and_not_taken_for_nothing(books: Books, body: Any, why: str) -> None:
    """One message among others whose body doesn't tell is named with the reason; the others count."""
    bad, good = books.transfer("A", "1.00", body=body), books.transfer("A", "2.00")
    (in_flight, of_bodies) = books.measure(money(), money(name="bodies", producer=None))
    for result, sentence in ((in_flight, "1 of 2 messages under way have"), (of_bodies, "1 of 2 messages have")):
        assert any(fault.startswith(sentence) and f"{bad}: " in fault and why in fault for fault in result.faults)
        assert str(good) not in " ".join(result.faults)
        assert row(result, "A", "EUR").in_flight == 2
        assert not result.in_sync


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"to": NaN}',
        b'{"amount": 1e999999999}',
        b'{"a": "\\u0000"}',
        b'{"a": "\\ud800"}',
        b"",
    ],
)
def test_what_is_called_json_and_isnt_doesnt_stop_the_others(books: Books, raw: bytes) -> None:
    """Broken JSON, another encoding, absurd nesting and numbers are told of; the bodies beside them count."""
    bad = books.transfer("A", "1.00")
    books.run(books.producer, "UPDATE outbox.half_message SET body = :raw WHERE id = :id", raw=raw, id=bad)
    books.transfer("A", "2.00")
    (result,) = books.measure(money(producer=None))
    assert [str(bad) in fault for fault in result.faults] == [True, True]
    assert [row(result, "A", "EUR").producer, row(result, "A", "EUR").in_flight] == [2, 2]


def test_messages_can_be_counted_without_reading_their_bodies(books: Books) -> None:
    """Paths of ``*`` alone need no JSON."""
    books.transfer("A", "1.00", body=b"\x00\xff")
    books.transfer("A", "1.00", body="text")
    counts = Measure("n", *OF_PAIR, (), ("n",), "SELECT 0 AS n", {"n": "*"})
    (result,) = books.measure(counts)
    assert result.rows == (MeasureRow((), "n", Decimal(2), Decimal(), Decimal(), Decimal(2)),)
    assert result.in_sync


def test_many_unreadable_bodies_are_one_sentence(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first few are named, the rest is counted; nothing is skipped where chunks meet."""
    monkeypatch.setattr(compute, "CHUNK", 2)
    for _ in range(5):
        books.transfer("A", "1.00", body="text")
    books.transfer("A", "1.00")
    (result,) = books.measure(money())
    (fault,) = result.faults
    assert fault.startswith("5 of 6 messages under way have a body that can't be read")
    assert fault.endswith("; and 2 more")
    assert row(result, "A", "EUR").in_flight == 1


def test_bodies_that_are_gone_are_told(books: Books) -> None:
    """What was pruned meanwhile, though the consumer never had it, isn't silently nothing."""
    (result,) = books.measure(money(), ids=[uuid7(), books.transfer("A", "1.00")])
    assert result.faults == (
        "the bodies of 1 of 2 messages under way are no longer in the producer's database (pruned?): "
        "what they carry isn't counted",
    )


def test_without_in_flight_a_message_under_way_leaves_the_measure_unproven(books: Books) -> None:
    """Nothing is guessed: the result says that it doesn't know, and how it could."""
    measure = money(in_flight={})
    (result,) = books.measure(measure)
    assert result.in_sync
    books.transfer("A", "1.00")
    (result,) = books.measure(measure)
    assert result.faults == (
        "1 messages are under way, and what they carry isn't known: "
        "give the measure in_flight, or a window in which all has arrived",
    )


_scalar = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.decimals(allow_nan=False, allow_infinity=False).map(str)
    | st.sampled_from(
        ["-0", "0.0", "-0.00", "1e2", "1.50E1", "007", "+1", "1.", ".5", " 1", "1\n", "\u0661", "NULL", ""]
    )
)
_value = st.recursive(
    _scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab0"), inner, max_size=3)
)
_raw = st.builds(lambda value: json.dumps(value).encode(), _value) | st.sampled_from(
    [
        f'{{"a": {number}}}'.encode()
        for number in ("1.50", "-0.0", "1e2", "1E+2", "12e-1", "0.10", "1e999", "-0", "1e-999")
    ]
)


@hypothesis_settings(max_examples=tries(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=_raw, path=st.sampled_from(["a", "a.b", "0", "a.0", "a.-1", "b.a"]))
def test_the_database_and_python_read_the_same(books: Books, raw: bytes, path: str) -> None:
    """Whatever a body is, both ways of reading it come to the same key and the same number, or to neither."""
    way = tuple(path.split("."))
    halves = Statement(
        "SELECT %(id)s AS id, %(type)s AS content_type, %(raw)b::bytea AS body, NULL::text AS encoding",
        {"id": 1, "type": JSON, "raw": raw},
    )
    for by, values in (([way], []), ([], [way]), ([way], [way, None])):
        try:
            read: Any = carried(raw, JSON, by, values)
        except InvalidMessage:
            read = None
        with books.producer.connect() as connection:
            try:
                ((_, good, *columns),) = [(row, *row) for row in execute(connection, body_sums(halves, by, values))[0]]
            except Exception as error:
                assert str(error.orig.sqlstate)[:2] in {"22", "54"}  # type: ignore[attr-defined]
                continue
        assert good == (read is not None)
        if read:
            assert tuple(columns[1 : 1 + len(by)]) == read[0]
            assert columns[1 + len(by) :] == read[1]


def test_compressed_bodies_count_like_others(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored compressed adds up to the same; what says so and isn't is told of."""
    settings = replace(books.outbox.settings, compress_above=1)
    monkeypatch.setattr(books, "outbox", Outbox(books.producer, settings=settings))
    note = "the same words " * 100
    for amount in ("1.10", "2.20"):
        body = {"to": {"account": "A"}, "currency": "EUR", "amount": amount, "note": note}
        books.transfer("A", amount, body=body)
    bad = books.transfer("A", "4.00", body={"to": {"account": "A"}, "currency": "EUR", "amount": "4.00", "note": note})
    encoded = "SELECT count(*) FROM outbox.half_message WHERE headers ->> 'outbox-encoding' = 'gzip'"
    with books.producer.connect() as connection:
        assert connection.execute(text(encoded)).scalar_one() == 3
    (result,) = books.measure(money(producer=None))
    assert row(result, "A", "EUR").producer == Decimal("7.30")
    assert result.faults == ()
    books.run(books.producer, "UPDATE outbox.half_message SET body = '{}' WHERE id = :id", id=bad)
    (result,) = books.measure(money(producer=None))
    assert row(result, "A", "EUR").producer == Decimal("3.30")
    assert any(f"{bad}: the body isn't the gzip" in fault for fault in result.faults)


def test_a_part_of_a_key_that_is_masked_is_in_no_result() -> None:
    """Its name tells that it is a secret; neither it is shown nor, by the order of the rows, which is the greater."""
    keys: set[tuple[str | None, ...]] = {(f"card-{number}", day) for number in range(20) for day in ("2", "1", None)}
    labels = [label for _, label in compute.shown(("cardNumber", "day"), keys)]
    assert set(labels) == {("***", "1"), ("***", "2"), ("***", None)}
    assert labels == sorted(labels, key=lambda label: (label[1] is None, label[1] or ""))
    assert compute.shown(("receiver", "day"), {("b", "1"), ("a", "1")})[0] == (("a", "1"), ("a", "1"))
