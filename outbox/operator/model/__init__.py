"""What `Admin` takes and returns: plain data, which is also what the HTTP endpoints and ``-o json`` show."""

from __future__ import annotations

from outbox.operator.health.overview import GroupLag, Overview, TopicLag
from outbox.operator.health.series import Series
from outbox.operator.health.system import DatabaseView, System, TableSize
from outbox.operator.health.workers import HandlerRow, WorkerRow
from outbox.operator.model.asked import (
    COUNT_LIMIT,
    MAX_IDS,
    MAX_ITEMS,
    MAX_PAGE,
    Action,
    Actor,
    Page,
    PageRequest,
    Total,
)
from outbox.operator.model.bulk_jobs import (
    AuditFilter,
    AuditRow,
    BulkItem,
    BulkJob,
    Preview,
    Selector,
    Target,
)
from outbox.operator.model.inbox import DeadGroup, InboxFilter, InboxRow
from outbox.operator.model.messages import (
    Body,
    HalfFilter,
    HalfRow,
    MessageFilter,
    MessageRow,
    ScheduledFilter,
    ScheduledRow,
)
from outbox.operator.model.way import Event, MessageView

__all__ = [
    "COUNT_LIMIT",
    "MAX_IDS",
    "MAX_ITEMS",
    "MAX_PAGE",
    "Action",
    "Actor",
    "AuditFilter",
    "AuditRow",
    "Body",
    "BulkItem",
    "BulkJob",
    "DatabaseView",
    "DeadGroup",
    "Event",
    "GroupLag",
    "HalfFilter",
    "HalfRow",
    "HandlerRow",
    "InboxFilter",
    "InboxRow",
    "MessageFilter",
    "MessageRow",
    "MessageView",
    "Overview",
    "Page",
    "PageRequest",
    "Preview",
    "ScheduledFilter",
    "ScheduledRow",
    "Selector",
    "Series",
    "System",
    "TableSize",
    "Target",
    "TopicLag",
    "Total",
    "WorkerRow",
]
