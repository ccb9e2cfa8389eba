"""A worker of one of two banks, with a broker between them: its arguments are those of `bank`."""

from __future__ import annotations

import sys
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Worker
from outbox.relay import (
    KafkaPublisher,
    KafkaSource,
    NatsPublisher,
    NatsSource,
    RabbitPublisher,
    RabbitSource,
    RedisPublisher,
    RedisSource,
)

BOOK = text("INSERT INTO ledger (transfer, account, amount) VALUES (:transfer, :account, :amount)")
LEDGER = """CREATE TABLE ledger (
    n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    transfer int NOT NULL, account text NOT NULL, amount int NOT NULL)"""


def publisher(kind: str, place: str, destination: str) -> Any:
    """Return what publishes to a destination."""
    if kind == "kafka":
        return KafkaPublisher({"bootstrap.servers": place, "log_level": 0}, destination, timeout=10)
    kinds = {"nats": NatsPublisher, "redis": RedisPublisher, "rabbitmq": RabbitPublisher}
    if kind == "rabbitmq":
        return RabbitPublisher(place, routing_key=destination, timeout=10)
    return kinds[kind](place, destination, timeout=10)


def source(kind: str, place: str, destination: str) -> Any:
    """Return what takes from it."""
    if kind == "kafka":
        config = {"bootstrap.servers": place, "log_level": 0, "session.timeout.ms": 6000}
        return KafkaSource(config, [destination], group="bank-b")
    if kind == "rabbitmq":
        return RabbitSource(place, destination)
    return {"nats": NatsSource, "redis": RedisSource}[kind](place, destination, group="bank-b")


def bank(side: str, kind: str, place: str, destination: str, url: str) -> Outbox:
    """Return the outbox of a bank: A relays what it sends, B takes it in and books it."""
    outbox = Outbox(create_engine(url))
    if side == "a":
        outbox.relay("transfer", to=publisher(kind, place, destination), group="bank-b")
        return outbox
    outbox.intake("transfer-in", source=source(kind, place, destination))

    @outbox.consumer("transfer-in", group="books", ordered="key")
    def book(message: Message, session: Session) -> None:
        body = message.body
        session.execute(BOOK, {"transfer": body["transfer"], "account": message.key, "amount": body["amount"]})

    return outbox


if __name__ == "__main__":
    sys.exit(Worker(bank(*sys.argv[1:])).run())
