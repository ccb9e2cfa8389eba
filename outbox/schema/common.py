"""The table that both sides have: what operators did."""

from __future__ import annotations

from functools import cache

from sqlalchemy import BigInteger, Column, DateTime, Identity, Index, MetaData, Table, Text, func
from sqlalchemy.dialects.postgresql import JSONB

from outbox.schema.types import NAMING


@cache
def common_tables(schema: str = "outbox") -> MetaData:
    """Return the metadata of the tables that a producer and a consumer both need, in ``schema``."""
    metadata = MetaData(schema=schema, naming_convention=NAMING)
    # Appended in the transaction of the act that it records.
    table = Table(
        "audit",
        metadata,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("acted_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
        Column("actor", Text, nullable=False),
        Column("action", Text, nullable=False),
        Column("target", Text, nullable=False),
        Column("reason", Text),
        Column("result", JSONB),
    )
    # Serves "what was done to this message".
    Index(None, table.c.target)
    return metadata
