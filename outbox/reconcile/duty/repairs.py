"""The repairs that operators have ordered of what reconciliations found: bulk jobs, whose items are the findings.

They are carried out as any bulk job, by a worker that has the reconciliation. A repair has transactions of its own in
both databases, while its items are leased, and tells of each finding at once what came of it: what a worker has done
that died over them isn't done again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.acts.changes import BUSY, ActOutcome, Target
from outbox.acts.whole_acts import REPAIR
from outbox.database.execute import Template, execute
from outbox.database.sql import NOW
from outbox.errors import SourceLost
from outbox.message.model import Counts
from outbox.operator.bulk.run import ActOnItems, OpenJob, carry_out
from outbox.reconcile.job import DONE, HEALED, LABELED, Job, Repair

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.reconcile.duty.reconciliation import DeclaredJob
    from outbox.reconcile.job import Pair
    from outbox.reconcile.rows import Repaired

_RUN: Template = Template("SELECT topic, consumer_group FROM {s}.reconciliation_run WHERE id = %(run)s")

_FINDINGS: Template = Template("""
SELECT message_id, kind, coalesce(action, 'alert'), result FROM {s}.reconciliation_finding
 WHERE run_id = %(run)s AND message_id = ANY (%(ids)s::uuid[])
""")


class Repairs:
    """Carries out the repairs ordered for the pairs of reconciliations; its calls are the passes of a duty."""

    def __init__(self, having: Sequence[DeclaredJob], schema: str) -> None:
        self._all = having
        self._having: dict[tuple[str, str], DeclaredJob] = {}
        self._schema = schema

    def __call__(self, connection: Connection, _: Connection, stopping: Callable[[], bool]) -> Counts:
        """Carry on with each repair that is ordered, as fast as it may be; those of pruned runs end."""
        located = [each for each in self._all if each.locate()]
        self._having = {pair: each for each in reversed(located) for pair in each.pairs}
        act_of = partial(self._act_of, connection)
        return carry_out(connection, self._schema, [REPAIR.name], act_of, stopping=stopping, leased=True)

    def _act_of(self, connection: Connection, ordered: OpenJob) -> ActOnItems | None:
        """Return how findings of a run are repaired; None if this worker doesn't have the reconciliation."""
        with connection.begin():
            ((now,),), runs = execute(connection, NOW, _RUN(self._schema, run=ordered.options["run"]))
        if not runs:
            pruned = ActOutcome("skipped", "its run was pruned", None)
            return lambda _, targets: [pruned] * len(targets)
        if (names := tuple(runs[0])) not in self._having:
            return None
        job: Job = replace(self._having[names].work_at(now), actor=ordered.actor)
        (pair,) = (pair for pair in job.pairs if (pair.feed, pair.group) == names)
        return partial(_repair, ordered, job, pair)


def _repair(
    ordered: OpenJob, job: Job, pair: Pair, connection: Connection, targets: Sequence[Target]
) -> list[ActOutcome]:
    """Repair findings, and write what came of them beside their items.

    Raises:
        SourceLost: a database is out of reach. What was repaired before is written with its findings.
    """
    from outbox.reconcile.record.write import acted, why_of  # noqa: PLC0415 - an extra
    from outbox.reconcile.repair import BUSY as REFUSED_BUSY  # noqa: PLC0415 - an extra
    from outbox.reconcile.rows import Repaired  # noqa: PLC0415 - an extra
    from outbox.reconcile.run import repair_found  # noqa: PLC0415 - an extra

    schema, run = job.consumer.schema, UUID(ordered.options["run"])
    with connection.begin():
        (rows,) = execute(connection, _FINDINGS(schema, run=run, ids=[target.message_id for target in targets]))
    chosen = ordered.options.get("repair")
    found = {each: (LABELED[kind], Repair(chosen or action)) for each, kind, action, _ in rows if kind in LABELED}
    # What a worker has done that died over its lease isn't looked at again: it would be taken for something else.
    results: dict[UUID, str] = {each: DONE for each, *_, result in rows if result == DONE}
    left = {each: known for each, known in found.items() if each not in results}
    by_repair = itemgetter(1)
    for (kind, action), group in itertools.groupby(sorted(left.items(), key=by_repair), key=by_repair):
        ids = [message_id for message_id, _ in group]
        if action is Repair.ALERT:
            came = dict.fromkeys(ids, "refused: the policy of the run only reports it; name a repair")
        else:
            mending: Any = replace(job, policy={kind: action})
            try:
                came = repair_found(
                    mending, pair, run, dict.fromkeys(ids, kind), why=ordered.reason, origin=ordered.origin
                )
            except DBAPIError as error:
                raise SourceLost(why_of(error, job)) from error
        results |= came
        news = [Repaired(each, *found[each], result) for each, result in came.items() if result != REFUSED_BUSY]
        # At once: a worker that comes to these after this one has died takes them for something else.
        with connection.begin():
            execute(connection, acted(schema, run, news))
    # A message without a result has changed under the repair's hands.
    tried = {each: Repaired(each, *known, results.get(each, REFUSED_BUSY)) for each, known in found.items()}
    return [_outcome(tried.get(target.message_id), REFUSED_BUSY) for target in targets]


def _outcome(repaired: Repaired | None, busy: str) -> ActOutcome:
    """Return what an item says of a repair; None: of a finding that isn't there any more."""
    if repaired is None:
        return ActOutcome("skipped", "its finding was pruned", None)
    action, result = repaired.action, repaired.result
    if result == DONE:
        return ActOutcome("done", f"{action.value}: {action.does}", None)
    if result == HEALED:
        return ActOutcome("done", "it has healed meanwhile: nothing was left to do", None)
    if result == busy:
        return ActOutcome("busy", BUSY, None)
    return ActOutcome("skipped", result.removeprefix("refused: "), None)
