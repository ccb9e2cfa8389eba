"""A fleet that is run by a timetable: its run in the record of the database whose workers run it.

The findings are in the consumers' databases, as always. This one run stands for all of it: when it began and ended,
and what it came to. It is of the pair `timetable.FLEET`, which no topic and group can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.errors import OutboxError
from outbox.reconcile.fleet.config import Fleet
from outbox.reconcile.fleet.report import fleet_verdict, sentence
from outbox.reconcile.fleet.run import FleetResult, compare_fleet, mend_fleet
from outbox.reconcile.job import Access, EngineName, Progress, Window
from outbox.reconcile.record.timetable import FLEET
from outbox.reconcile.record.write import RunIds, RunRecord


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A fleet, the database that records that it is run, and which messages are compared."""

    fleet: Fleet
    recorder: Access
    window: Window
    record: bool = True

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """What its run is called in place of a topic and a group."""
        return (FLEET,)

    @property
    def accesses(self) -> tuple[Access, ...]:
        """All databases that it speaks to."""
        of_jobs = self.fleet.job.get("record_in")
        return (*self.fleet.databases.values(), self.recorder, *([of_jobs] if of_jobs else []))

    def carry_out(self, ids: RunIds, progress: Progress) -> FleetResult:
        """Compare the fleet, repair what differs if its jobs say so, and record what came of it.

        A run in which something came to no result is recorded as failed, with what was counted of the rest.

        Raises:
            InvalidSettings: as `compare_fleet`.
            SourceLost: the record can't be written.
        """
        record, (run_id,) = RunRecord(self), ids.runs
        try:
            with record.alive(ids.runs):
                result = compare_fleet(self.fleet, progress)
                if self.fleet.job.get("apply"):
                    mend_fleet(self.fleet, result, progress)
        except BaseException as error:
            # This is the error to tell, also where the record can't be written any more.
            with suppress(OutboxError):
                record.fail(run_id, error)
            raise
        self._end(record, run_id, result)
        return result

    def _end(self, record: RunRecord, run_id: UUID, result: FleetResult) -> None:
        if result.failed:
            record.fail(run_id, sentence(result))
        pairs = [pair for _, each in result.results for pair in each.pairs]
        counts = sum((pair.counts for pair in pairs), Counter())
        plan: Mapping[str, Any] = {
            "engine": EngineName.LOCAL,
            "why": [sentence(result), f"{len(result.members)} jobs of two databases each, {len(pairs)} pairs in all"],
            "rows_read": sum(pair.plan.rows_read for pair in pairs),
            "healed": sum(pair.healed for pair in pairs),
            # All findings are in the consumers' databases.
            "left_out": fleet_verdict(result).left,
            "members": len(result.members),
            "failed": result.failed,
        }
        record.close(run_id, {outcome.label: number for outcome, number in sorted(counts.items()) if number}, plan)
