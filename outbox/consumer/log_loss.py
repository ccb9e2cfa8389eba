"""A log that went back: find where a group's offset and the log still agree, go on from there, and tell of the loss.

The producer's database may lose messages that a group has read: an asynchronous replica is promoted without the last
transactions, a dump or a volume is put back. Where its identity changed with that, dispatch goes on in a new epoch,
behind every offset; where nothing tells it (a volume that its storage put back), new messages take positions that the
group has passed. So each offset keeps the id of its message, and a consumer compares it with the log whenever it reads:

- another message at the offset, or no message there and none after it: the log went back;
- after the offset a number that isn't greater (of a later epoch): it went back, and has begun anew since.

The group then goes on after the last message that its inbox (or an older offset) has at the same position as the log.
It reads what follows once more; the inbox knows what it has handled, so that nothing takes effect twice. What the inbox
has from behind that position and the producer doesn't know as committed is lost: it is written down in ``log_loss``.

The other way round, when the consumer's database falls back, nothing needs to be found out: offset, inbox and effects
are of one moment, and what follows that offset is read again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.consumer import sql
from outbox.database.at_commit import after_commit
from outbox.database.execute import execute, read_log, read_source
from outbox.telemetry.events import LogWentBack
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.consumer.progress import ConsumerProgress

#: Messages that are compared at a time.
_COMPARED = 1_000
#: Inbox rows, the newest of the group, among which the lost messages are looked for.
_NEWEST = 100_000


def go_back(connection: Connection, source: Connection, progress: ConsumerProgress) -> bool:
    """Move a group's offset, which the log doesn't agree with, to where both agree; False if it may stay.

    Of the connections, the first is in a transaction, which holds the queue's lock and has read the offset before this
    reads the source: a log that grew in between can't be taken for one that went back.
    """
    of, position = progress.of, progress.position
    (heads,) = read_log(connection, source, sql.heads(of.schema, topic=progress.topic))
    last, _, is_standby = next((row[1:4] for row in heads if row[0] == progress.number), (0, None, False))
    if is_standby and last < position:
        return False  # it lags behind the primary from which the group has read
    agreed, message_id = _agreed(connection, source, progress) or (_before_first(connection, source, progress), None)
    values: dict[str, Any] = {"group": of.group, "topic": of.topic, "queue": of.queue}
    values |= {"agreed": agreed, "position": position}
    # The last message of a queue is never pruned: if none is left of before the offset, there never was one.
    after = agreed if agreed <= position else 0
    (had,) = execute(connection, sql.had_between(of.schema, **values | {"agreed": after}, limit=_NEWEST))
    (committed,) = read_source(source, sql.committed(of.schema, ids=[row[0] for row in had]))
    lost = sorted({row[0] for row in had} - {row[0] for row in committed})
    execute(connection, sql.go_back(of.schema, **values, id=message_id, lost=lost))
    event = LogWentBack(**values | {"queue": progress.number}, count=len(lost), lost=tuple(lost))
    after_commit(connection, partial(emit, event))
    return True


def _before_first(connection: Connection, source: Connection, progress: ConsumerProgress) -> int:
    (rows,) = read_log(connection, source, sql.beginnings(progress.of.schema, topic=progress.topic))
    return next((first for number, first in rows if number == progress.number), 1) - 1


def _agreed(connection: Connection, source: Connection, progress: ConsumerProgress) -> tuple[int, UUID] | None:
    """Return the last message, up to the offset, that the log has where the group had it; None if there is none."""
    of, position = progress.of, progress.position
    while True:
        before = {"topic": progress.topic, "queue": progress.number, "position": position, "limit": _COMPARED}
        (rows,) = read_log(connection, source, sql.messages_before(of.schema, **before))
        if not rows:
            return None
        of_log = {"positions": [row[0] for row in rows], "ids": [row[1] for row in rows]}
        of_group = sql.agreed(of.schema, group=of.group, topic=of.topic, queue=of.queue, **of_log)
        if found := execute(connection, of_group)[0]:
            return found[0][0], found[0][1]
        position = rows[-1][0] - 1
