"""The inbox row behind a finding, locked and compared with what the finding saw."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection

from outbox.model import Status
from outbox.reconcile.model import InboxState
from outbox.reconcile.repair.work import Work, ids_of
from outbox.reconcile.result import Finding
from outbox.store import repair as store
from outbox.store.execute import execute

_STATE = {
    Status.CONSUMED: InboxState.CONSUMED,
    Status.FAILED: InboxState.FAILED,
    Status.PARKED: InboxState.PARKED,
    Status.ROLLED_BACK: InboxState.ROLLED_BACK,
}


@dataclass(frozen=True, slots=True)
class InboxRow:
    """An inbox row as it is now; it is locked."""

    status: Status
    attempts: int
    changed_at: dt.datetime

    def is_as(self, finding: Finding) -> bool:
        """Has nobody changed it since the finding?"""
        seen = (finding.status, finding.attempts, finding.changed_at)
        return (_STATE[self.status], self.attempts, self.changed_at) == seen

    @property
    def changed(self) -> str:
        """The result where somebody has."""
        return f"refused: it has changed meanwhile: {self.status.value} after {self.attempts} attempts"


@dataclass(frozen=True, slots=True)
class Inbox:
    """The inbox rows of some findings: ``rows`` are locked until the transaction ends, ``busy`` are somebody else's."""

    rows: dict[UUID, InboxRow]
    busy: frozenset[UUID]


def lock(work: Work, connection: Connection, findings: Sequence[Finding]) -> Inbox:
    """Lock the inbox rows of findings, without waiting for those that somebody else has."""
    schema, group, ids = work.job.consumer.schema, work.pair.group, ids_of(findings)
    # In this order: what is there and isn't locked by us has come meanwhile, or is somebody else's.
    locked, there = execute(connection, store.lock_inbox(schema, group, ids), store.statuses(schema, group, ids))
    rows = {row[0]: InboxRow(Status(row[1]), *row[2:]) for row in locked}
    return Inbox(rows, frozenset(message_id for message_id, _ in there if message_id not in rows))


def had_none(finding: Finding) -> bool:
    """Tell whether the inbox had no row of it when it was found."""
    return finding.status in {None, InboxState.NONE}
