"""The framework's tables that the audit reads."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Numeric, cast, func

from outbox.database.tables import consumer_tables, producer_tables

from . import bank_a, bank_b
from .message import TOPIC

_A, _B = bank_a.outbox.settings.schema, bank_b.outbox.settings.schema

HALVES, OPS, CHECKS, HISTORY, MESSAGES, COMPENSATIONS, BRANCHES = (
    producer_tables(_A).tables[f"{_A}.{name}"]
    for name in ("half_message", "op_message", "half_check", "check_history", "message", "compensation", "tcc_branch")
)
INBOX = consumer_tables(_B).tables[f"{_B}.consumer_message"]
#: Where something is between the banks, each is producer and consumer.
HALVES_B, MESSAGES_B = (producer_tables(_B).tables[f"{_B}.{name}"] for name in ("half_message", "message"))
INBOX_A = consumer_tables(_A).tables[f"{_A}.consumer_message"]

#: The notices to bank A are half messages, too.
OF_TRANSFERS = HALVES.c.topic == TOPIC
_BODY = cast(func.convert_from(HALVES.c.body, "UTF8"), JSON)
#: What a half message says: the id of the transfer, and its amount.
TRANSFER = cast(_BODY["transfer_id"].as_string(), BigInteger)
AMOUNT = cast(_BODY["amount"].as_string(), Numeric(14, 2))
