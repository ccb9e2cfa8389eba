"""Messages of the internal topic ``outbox.reconcile``: each asks the workers for one run of a reconciliation.

The key of a message, and the group that handles it, are called as the reconciliation: so its runs come one after the
other. A run by the timetable is asked for by a message with a ``deliver_at``, whose id is made of that time: many
workers, and one of them again, make one of it. An operator asks for a run by a message that is delivered at once.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from outbox.database.execute import Statement, Template
from outbox.message.ids import derived_id
from outbox.reconcile.record.timetable import LastRun

TOPIC = "outbox.reconcile"
_SEND = Template(f"""
WITH half AS (
    INSERT INTO {{s}}.half_message (id, producer_group, topic, key, content_type, body, deliver_at)
    VALUES (%(id)s, 'outbox', '{TOPIC}', %(key)s, 'application/json', %(body)s, %(at)s::timestamptz)
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO {{s}}.op_message (half_id, resolution, decided_by) SELECT id, 'commit', 'producer' FROM half
""")
#: No id that bears a time: such an id would lie among messages that are long pruned, where a run is a month after the
#: last one.
_NO_TIME = UUID(int=0)
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a message asks for: a run of a reconciliation, which is known by its name and the first pair it compares.

    ``by`` is the operator that ordered the run, and ``why``; None: it is one of the timetable.
    """

    schedule: str
    topic: str
    group: str
    by: str | None = None
    why: str = ""
    dry_run: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> RunRequest:
        """Return what the body of a message asks for."""
        return cls(**body)

    @property
    def pair(self) -> tuple[str, str]:
        """The first pair of topic and group that is compared."""
        return self.topic, self.group

    def send(self, schema: str, message_id: UUID, deliver_at: dt.datetime | None = None) -> Statement:
        """Write the message, unless its id is there: by any of these statements, once."""
        body = json.dumps(asdict(self), ensure_ascii=False).encode()
        return _SEND(schema, id=message_id, key=self.schedule, body=body, at=deliver_at)

    def scheduled_id(self, last: LastRun, due: dt.datetime) -> UUID:
        """Return the id of the message by which the run after ``last`` is asked for, which is due at a time.

        One that is overdue is asked for once more each day: its message may have been parked, or recalled.
        """
        overdue = max(last.now - due, dt.timedelta())
        # One that was never run is due since the first look at it, of which no row tells.
        since = "first" if last.began is None else due.isoformat()
        day = last.now.timestamp() // _DAY if last.began is None else overdue.days
        return derived_id(_NO_TIME, "reconcile", self.schedule, *self.pair, since, int(day))
