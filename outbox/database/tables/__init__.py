"""The tables, in SQLAlchemy Core: one metadata for each part, in a schema of their own.

`producer_tables` go into the producer's business database, `consumer_tables` into the consumer's, which may be the
same one; `common_tables` go with either. The migrations build the same tables (a test compares the two).
"""

from __future__ import annotations

from outbox.database.tables.common import common_tables
from outbox.database.tables.consumer import consumer_tables
from outbox.database.tables.producer import producer_tables

__all__ = ["common_tables", "consumer_tables", "producer_tables"]
