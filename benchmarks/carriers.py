"""Carriers: what a message costs the business transaction, by driver, beside an INSERT by hand on the same connection.

The transaction is that of `benchmarks.send`: a debit and an entry in the ledger, then a message or a row by hand.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import asyncpg
import psycopg
import psycopg2
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from benchmarks import bank, handmade
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Arm, Figure, compared, interleave, rate
from outbox import Outbox, Settings

_BAR = 0.9

_MOVE = "UPDATE account SET balance = balance - {0} WHERE id = {1}"
_NOTE = "INSERT INTO ledger (account_id, amount) VALUES ({0}, {1})"
_HAND = "INSERT INTO handmade (message_id, topic, key, body) VALUES ({0}, {1}, {2}, {3})"
_SEND = "SELECT outbox.send({0}, {1}, {2})"

#: Runs transactions, the given number of them.
Transactions = Callable[[int], None]
AsyncTransactions = Callable[[int], Awaitable[None]]


def run(lab: Lab) -> list[Figure]:
    """Measure each carrier beside an INSERT by hand."""
    bank.open_bank(lab.engine("main"))
    handmade.create(lab.engine("main"))
    count, rounds = lab.scale(20, 10), lab.scale(120, 4)
    figures: list[Figure] = []

    def measure(name: str, ours: Transactions, hand: Transactions) -> None:
        lab.say(f"carriers: {name}")
        arms: dict[str, Arm] = {
            each: partial(rate, count, partial(transactions, count))
            for each, transactions in (("ours", ours), ("hand", hand))
        }
        results = interleave(arms, rounds)
        figures.append(compared(name, "", results["ours"], "hand-written INSERT", results["hand"], _BAR))

    for driver in ("psycopg", "psycopg2"):
        with _of_session(lab, driver) as pair:
            measure(f"Session on {driver}", *pair)
    connects: dict[str, Callable[[str], Any]] = {"psycopg": psycopg.connect, "psycopg2": psycopg2.connect}
    for driver, connect in connects.items():
        with _of_dbapi(lab, connect) as (ours, hand, sql):
            measure(f"a connection of {driver}", ours, hand)
            measure(f"outbox.send in SQL, by {driver}", sql, hand)
    with asyncio.Runner() as runner:

        def synchronous(transactions: AsyncTransactions) -> Transactions:
            async def act(number: int) -> None:
                await transactions(number)

            return lambda number: runner.run(act(number))

        for driver in ("psycopg", "asyncpg"):
            for name, coroutines in runner.run(_of_async_connection(lab, driver)).items():
                measure(name, *map(synchronous, coroutines))
        for name, coroutines in runner.run(_of_asyncpg(lab)).items():
            measure(name, *map(synchronous, coroutines))
    return figures


def _dsn(lab: Lab) -> str:
    return make_url(lab.urls["main"]).set(drivername="postgresql").render_as_string(hide_password=False)


def _url(lab: Lab, driver: str) -> str:
    return make_url(lab.urls["main"]).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)


def _by_hand(order: dict[str, Any]) -> tuple[str, str, str, str]:
    return str(uuid4()), bank.TOPIC, order["receiver"], json.dumps(order, default=str)


@contextmanager
def _of_session(lab: Lab, driver: str) -> Iterator[tuple[Transactions, Transactions]]:
    # An engine for each arm: hooks of ours must not slow down arms that don't use them.
    ours, hand = create_engine(_url(lab, driver)), create_engine(_url(lab, driver))
    outbox = Outbox(ours, settings=Settings())

    def business(session: Session) -> dict[str, Any]:
        order = bank.new_order()
        session.execute(bank.MOVE, {"account_id": order["sender"], "moved": -order["amount"]})
        session.execute(bank.NOTE, {"account_id": order["sender"], "amount": -order["amount"]})
        return order

    def send(number: int) -> None:
        for _ in range(number):
            with Session(ours) as session, session.begin():
                order = business(session)
                outbox.send(session, bank.TOPIC, order, key=order["receiver"])

    def insert(number: int) -> None:
        for _ in range(number):
            with Session(hand) as session, session.begin():
                order = business(session)
                session.execute(handmade.INSERT, handmade.values(bank.TOPIC, order["receiver"], order))

    yield send, insert
    ours.dispose()
    hand.dispose()


@contextmanager
def _of_dbapi(lab: Lab, connect: Callable[[str], Any]) -> Iterator[tuple[Transactions, ...]]:
    outbox = Outbox(lab.engine("main"), settings=Settings())
    connection = connect(_dsn(lab))
    cursor = connection.cursor()
    move, note, hand, sql = (text.format("%s", "%s", "%s", "%s") for text in (_MOVE, _NOTE, _HAND, _SEND))

    def transactions(tell: Callable[[dict[str, Any]], object], number: int) -> None:
        for _ in range(number):
            order = bank.new_order()
            cursor.execute(move, (order["amount"], order["sender"]))
            cursor.execute(note, (order["sender"], -order["amount"]))
            tell(order)
            connection.commit()

    def send(order: dict[str, Any]) -> None:
        outbox.send(connection, bank.TOPIC, order, key=order["receiver"])

    def insert(order: dict[str, Any]) -> None:
        cursor.execute(hand, _by_hand(order))

    def call(order: dict[str, Any]) -> None:
        cursor.execute(sql, (bank.TOPIC, json.dumps(order, default=str), order["receiver"]))

    yield tuple(partial(transactions, tell) for tell in (send, insert, call))
    connection.close()


async def _of_async_connection(lab: Lab, driver: str) -> dict[str, tuple[AsyncTransactions, AsyncTransactions]]:
    ours, hand = create_async_engine(_url(lab, driver)), create_async_engine(_url(lab, driver))
    outbox = Outbox(ours, settings=Settings())

    async def business(connection: Any) -> dict[str, Any]:
        order = bank.new_order()
        await connection.execute(bank.MOVE, {"account_id": order["sender"], "moved": -order["amount"]})
        await connection.execute(bank.NOTE, {"account_id": order["sender"], "amount": -order["amount"]})
        return order

    async def send(number: int) -> None:
        for _ in range(number):
            async with ours.begin() as connection:
                order = await business(connection)
                outbox.send(connection, bank.TOPIC, order, key=order["receiver"])

    async def insert(number: int) -> None:
        for _ in range(number):
            async with hand.begin() as connection:
                order = await business(connection)
                await connection.execute(handmade.INSERT, handmade.values(bank.TOPIC, order["receiver"], order))

    return {f"AsyncConnection on {driver}": (send, insert)}


async def _of_asyncpg(lab: Lab) -> dict[str, tuple[AsyncTransactions, AsyncTransactions]]:
    outbox = Outbox(lab.engine("main"), settings=Settings())
    connection = await asyncpg.connect(_dsn(lab))
    move, note, hand, sql = (text.format("$1", "$2", "$3", "$4") for text in (_MOVE, _NOTE, _HAND, _SEND))

    async def transactions(tell: Callable[[dict[str, Any]], Awaitable[object]], number: int) -> None:
        for _ in range(number):
            order = bank.new_order()
            async with connection.transaction():
                await connection.execute(move, order["amount"], order["sender"])
                await connection.execute(note, order["sender"], -order["amount"])
                await tell(order)

    async def send(order: dict[str, Any]) -> None:
        await outbox.send(connection, bank.TOPIC, order, key=order["receiver"])

    async def insert(order: dict[str, Any]) -> None:
        await connection.execute(hand, *_by_hand(order))

    async def call(order: dict[str, Any]) -> None:
        await connection.fetchval(sql, bank.TOPIC, json.dumps(order, default=str), order["receiver"])

    by_hand = partial(transactions, insert)
    return {
        "a connection of asyncpg": (partial(transactions, send), by_hand),
        "outbox.send in SQL, by asyncpg": (partial(transactions, call), by_hand),
    }


BENCHMARK = Benchmark(run)
