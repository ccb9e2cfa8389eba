"""Transactional messages as tables next to your data, on PostgreSQL.

The public names below are imported when first used, so that ``import outbox`` costs next to nothing::

    from outbox import INJECTED, Message, Outbox, Settings
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.app import Outbox
    from outbox.errors import (
        ActRefused,
        AdminError,
        AlreadyCommitted,
        AlreadyDecided,
        AlreadyRolledBack,
        CheckRefused,
        CompensationRefused,
        DecisionError,
        DecisionRefused,
        HalfNotFound,
        InvalidHandler,
        InvalidMessage,
        InvalidRequest,
        InvalidSettings,
        MessageNotFound,
        MessagesPruned,
        NotParked,
        OperationNotFound,
        OperationTooLarge,
        OutboxBusy,
        OutboxError,
        RecallRefused,
        ReconcileError,
        SchemaBusy,
        SchemaError,
        SchemaMissing,
        SchemaOutdated,
        SelectorChanged,
        SourceError,
        TransactionRequired,
        UnknownDatabase,
        VersionMismatch,
    )
    from outbox.message.model import (
        Answer,
        Counts,
        Decision,
        Message,
        Orphan,
        Outgoing,
        Park,
        Resolution,
        Retry,
        Skip,
        Status,
    )
    from outbox.producer.decorators import INJECTED
    from outbox.settings import Settings

__version__ = "0.1.0"

_HOME = {
    "Outbox": "outbox.app",
    "INJECTED": "outbox.producer.decorators",
    "Settings": "outbox.settings",
    **dict.fromkeys(
        (
            "Answer",
            "Counts",
            "Decision",
            "Message",
            "Orphan",
            "Outgoing",
            "Park",
            "Resolution",
            "Retry",
            "Skip",
            "Status",
        ),
        "outbox.message.model",
    ),
    **dict.fromkeys(
        (
            "ActRefused",
            "AdminError",
            "AlreadyCommitted",
            "AlreadyDecided",
            "AlreadyRolledBack",
            "CheckRefused",
            "CompensationRefused",
            "DecisionError",
            "DecisionRefused",
            "HalfNotFound",
            "InvalidHandler",
            "InvalidMessage",
            "InvalidRequest",
            "InvalidSettings",
            "MessageNotFound",
            "MessagesPruned",
            "NotParked",
            "OperationNotFound",
            "OperationTooLarge",
            "OutboxBusy",
            "OutboxError",
            "RecallRefused",
            "ReconcileError",
            "SchemaBusy",
            "SchemaError",
            "SchemaMissing",
            "SchemaOutdated",
            "SelectorChanged",
            "SourceError",
            "TransactionRequired",
            "UnknownDatabase",
            "VersionMismatch",
        ),
        "outbox.errors",
    ),
}

__all__ = [
    "INJECTED",
    "ActRefused",
    "AdminError",
    "AlreadyCommitted",
    "AlreadyDecided",
    "AlreadyRolledBack",
    "Answer",
    "CheckRefused",
    "CompensationRefused",
    "Counts",
    "Decision",
    "DecisionError",
    "DecisionRefused",
    "HalfNotFound",
    "InvalidHandler",
    "InvalidMessage",
    "InvalidRequest",
    "InvalidSettings",
    "Message",
    "MessageNotFound",
    "MessagesPruned",
    "NotParked",
    "OperationNotFound",
    "OperationTooLarge",
    "Orphan",
    "Outbox",
    "OutboxBusy",
    "OutboxError",
    "Outgoing",
    "Park",
    "RecallRefused",
    "ReconcileError",
    "Resolution",
    "Retry",
    "SchemaBusy",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SelectorChanged",
    "Settings",
    "Skip",
    "SourceError",
    "Status",
    "TransactionRequired",
    "UnknownDatabase",
    "VersionMismatch",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'outbox' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
