"""The tables, in SQLAlchemy Core: one metadata for each part, in a schema of their own.

`producer_tables` go into the producer's business database, `consumer_tables` into the consumer's, which may be the
same one; `common_tables` go with either. The migrations build the same tables (a test compares the two).
"""

from outbox.database.tables.common import SEGMENTED as SEGMENTED
from outbox.database.tables.common import common_tables as common_tables
from outbox.database.tables.consumer import consumer_tables as consumer_tables
from outbox.database.tables.producer import producer_tables as producer_tables
