"""What `Admin` takes and returns: plain data, which is also what the HTTP endpoints and ``-o json`` show."""

from __future__ import annotations

from outbox.admin.model.asked import COUNT_LIMIT, MAX_IDS, MAX_ITEMS, MAX_PAGE, Action, Actor, Page, PageRequest, Total
from outbox.admin.model.inbox import DeadGroup, InboxFilter, InboxRow
from outbox.admin.model.messages import (
    Body,
    HalfFilter,
    HalfRow,
    MessageFilter,
    MessageRow,
    ScheduledFilter,
    ScheduledRow,
)
from outbox.admin.model.operations import AuditFilter, AuditRow, OperationItem, OperationRow, Preview, Selector, Target
from outbox.admin.model.standing import (
    DatabaseView,
    GroupLag,
    HandlerRow,
    Overview,
    Problem,
    Series,
    System,
    TableSize,
    TopicLag,
    WorkerRow,
)
from outbox.admin.model.way import Event, MessageView

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
    "OperationItem",
    "OperationRow",
    "Overview",
    "Page",
    "PageRequest",
    "Preview",
    "Problem",
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
