"""Dispatch: committed ops become messages, in commit order, none lost, none doubled, waiting for no sender.

The cursor is a snapshot, not a number: dispatched is what the snapshot sees. A transaction that was in flight
is in the snapshot's list, and its ops are looked up by xid once it has ended, so that a transaction held open
for an hour delays its own messages only (``id > last`` would lose them, ``xid < xmin`` would stall all senders).

Order: what one snapshot adds is dispatched in the order of the ops' sequence, which is drawn just before the
commit, while row locks are held: of two transactions that a lock serialised, the first draws the lower number,
and no snapshot sees the second without the first. A backlog larger than a batch is therefore cut by sequence
*inside* one snapshot (``target``), and that snapshot is finished before a newer one is looked at. Cutting by
xid would be wrong: xids are given at the first write, not at commit.

Epochs: a database may forget what consumers have read (an asynchronous replica is promoted without the last
transactions, a dump or a backup is restored), and would then give those positions to new messages, which the consumers'
offsets hide. So a position is an epoch and, in its lower 32 bits, a number. A worker or an act that appends looks
first, under the lock, whether the log still is the one of the newest cursor (`outbox.database.sql.LOG`); if not, a new
epoch begins. It is the clock's seconds since 2024, and higher than the one that is known here: the lost log may have
begun epochs that this database doesn't know of. Numbers go on where the queue has them, so that a gap which was pruned
and a lag can be told from a jump. Only a restore into another cluster changes what xids mean, and needs a re-base:
after a promotion cursor and ops are of one moment. What no identity shows (a volume that its storage put back), the
consumers find out by themselves: `outbox.consumer.log_loss`.

Durability: a crash must not forget what was read, or its position would be another message's. Dispatch commits
synchronously, also where the setting says otherwise, unless its worker also consumes from this database: what a
consumer here commits comes later in the same log, so that neither survives without the other. A consumer whose own
tables are in another database waits by itself for what it has read (`outbox.database.execute.read_log`).

A pass looks at the cursor without the lock, and goes on only if there is something to do. Lock, batch and COMMIT are
then one round trip, in which nothing waits for the client: a worker whose host vanishes leaves no lock behind. The
cursor seen before the lock is compared after it, in a statement of its own, which sees what the last holder wrote.
The pass of a worker that was told of ops needs no look: it goes by the cursor that it left itself.

Senders tell of ops, but not while a pass holds the lock ``awake`` (`outbox.database.sql.nudge`), as it does where ops
come faster than passes. Such a pass is followed by another look at once, which sees what was committed meanwhile.

Source of the visibility rules: PostgreSQL, "Transaction ID and Snapshot Information Functions".
"""

from __future__ import annotations

import math
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.exc import DBAPIError, OperationalError

from outbox.database import sql as database_sql
from outbox.database.at_commit import after_commit, announce, behind_commit
from outbox.database.duty import APPEND, Duty, Post, Task
from outbox.database.execute import LOCK_NOT_AVAILABLE, by_size, execute, lock_key, sqlstate, statement
from outbox.database.sql import COMMIT_SYNCHRONOUSLY, awake_lock, notify, plan_by_index, take_lock
from outbox.dispatch import sql
from outbox.errors import HalfNotFound, HalvesHidden, SequenceBehind
from outbox.message.model import Counts
from outbox.telemetry.events import EpochBegun, HalfMissing
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection

    from outbox.database.execute import Row, Statement
    from outbox.settings import Settings

    #: Takes what `outbox.database.sql.read_news` reads.
    OnNews = Callable[[str], object]

NOTHING = Counts()
#: A pass that begins within so many seconds after one that had work: ops may come faster than passes.
BUSY = 0.003
_SEQUENCE_OF_OPS = {"table": "op_message", "column": "sequence", "named": "op_sequence"}


def dispatch_lock(schema: str) -> int:
    """Return the advisory lock of every transaction that appends messages: positions stay dense."""
    return lock_key("dispatch", schema)


def dispatch_once(
    connection: Connection, settings: Settings, *, limit: int | None = None, on_news: OnNews | None = None
) -> Counts:
    """Dispatch one batch in one transaction on ``connection``, which must not be in one.

    Calls ``on_news``, once it is committed, with each topic or queue that has new messages. Returns ``taken`` ops and
    ``done`` messages; nothing where another worker is dispatching. ``more`` is set if there are more ops by now.

    Raises:
        HalvesHidden: row security hides the half of a committed op; nothing was dispatched.
        SequenceBehind: this is another cluster, and the sequence of ops didn't come with the tables.
    """
    return Dispatcher(settings, on_news).once(connection, limit)


class Dispatcher:
    """Dispatches batch after batch, as `dispatch_once`, and keeps the cursor that its last pass has left.

    ``awake``: it is called again at once where it returns ``more``. ``durable``: a commit waits for the disk.
    """

    def __init__(
        self, settings: Settings, on_news: OnNews | None = None, *, awake: bool = False, durable: bool = True
    ) -> None:
        self._settings = settings
        self._on_news = on_news
        self._awake = awake_lock(settings.schema) if awake else None
        self._worked_at = -math.inf
        self._durable = durable
        self._nudged = False
        self._left: sql.Cursor | None = None

    def nudge(self) -> None:
        """Take note that ops were committed; from any thread."""
        self._nudged = True

    def once(self, connection: Connection, limit: int | None = None) -> Counts:
        """Dispatch one batch; raises as `dispatch_once`."""
        most = self._settings.dispatch_batch if limit is None else limit
        nudged, self._nudged = self._nudged, False
        known, self._left = self._left, None
        if known is not None and not (nudged or known.pending):
            known = None
        name = ("dispatch", self._settings.schema)
        while (counts := by_size(connection, name, most, partial(self._attempt, connection, known))) is None:
            known = None  # each time, another worker has come further, or a new epoch has begun
        return counts

    def _attempt(self, connection: Connection, known: sql.Cursor | None, limit: int) -> Counts | None:
        """Dispatch one batch; None where the cursor isn't any more what it was before the lock."""
        schema, cursor = self._settings.schema, known or self._read_cursor(connection)
        if cursor is None or cursor.restored:
            return _start_over(connection, schema)
        if cursor.fell_back:
            taken, begun = _in_turn(connection, schema, sql.begin_epoch_in_turn(schema))
            _tell(begun)
            return None if taken else NOTHING
        if not cursor.pending and not known:
            self._left = cursor
            return NOTHING
        awake = self._awake if time.monotonic() - self._worked_at < BUSY else None
        keep_turn = sql.keep_turn(schema, cursor=cursor.id, log=cursor.current_log, awake=awake, **cursor.values)
        batch = sql.dispatch_batch(self._settings, limit, cursor), sql.newest_cursor(schema)
        taken, ((unchanged, was_awake),), ((ops, messages, scheduled, news, unseen),), left = _in_turn(
            connection, schema, keep_turn, *batch, durable=self._durable
        )
        if not unchanged:
            return None if taken else NOTHING
        self._left = sql.Cursor(*left[0])
        if ops:
            self._worked_at = time.monotonic()
        _pass_on(connection, self._settings, news or [], self._on_news)
        _tell_missing(unseen)
        return Counts(taken=ops, done=messages + scheduled, more=self._left.pending or bool(was_awake))

    def _read_cursor(self, connection: Connection) -> sql.Cursor | None:
        with connection.begin():
            # Passes that find nothing commit, since psycopg throws its prepared statements away with each rollback.
            newest = sql.newest_cursor(self._settings.schema)
            _, cursors = execute(connection, plan_by_index(once=True), newest, then_commit=True)
        return sql.Cursor(*cursors[0]) if cursors else None


def _in_turn(connection: Connection, schema: str, *statements: Statement, durable: bool = True) -> Any:
    """Run statements, which do nothing without the lock, in a transaction that holds it; return if it does, their rows.

    All is one round trip: a host that vanishes meanwhile leaves no lock behind.
    """
    begin = sql.begin_turn(dispatch_lock(schema), durable=durable)
    try:
        with connection.begin():
            ((taken, *_),), *rows = execute(connection, begin, *statements, then_commit=True, prepare_before=True)
    except DBAPIError as error:
        if hidden := re.search(rf"{sql.HIDDEN}(\d+) ([0-9a-f-]+)", str(error)):
            raise HalvesHidden(schema, int(hidden[1]), UUID(hidden[2])) from error
        raise
    return taken, *rows


def _start_over(connection: Connection, schema: str) -> Counts | None:
    """Re-base in this cluster; nothing while another worker dispatches, or a transaction has an op written and is open.

    Once in the life of a database, and not in one round trip: writers of ops are kept out meanwhile.
    """
    with connection.begin() as transaction:
        ((taken, *_),), cursors = execute(connection, sql.try_turn(dispatch_lock(schema)), sql.newest_cursor(schema))
        if not taken:
            return NOTHING
        if cursors and not sql.Cursor(*cursors[0]).restored:
            return None
        try:
            numbers = statement(schema, sql.SEQUENCE, _SEQUENCE_OF_OPS, rows="SELECT sequence FROM {s}.op_message")
            waiting = COMMIT_SYNCHRONOUSLY, sql.WAIT_SHORTLY, sql.lock_ops(schema)
            *_, ((_, value, highest),) = execute(connection, *waiting, numbers)
            if value is not None and value < highest:
                # What came now would count as of before the re-base, and never be dispatched.
                raise SequenceBehind(f"{schema}.op_sequence", value, highest)
            begun, _ = execute(connection, sql.begin_epoch(schema), sql.rebase(schema))
        except OperationalError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            transaction.rollback()
            return NOTHING
    _tell(begun)
    return Counts(taken=1, more=True)


def _pass_on(connection: Connection, settings: Settings, news: Sequence[str], on_news: OnNews | None) -> None:
    """Tell of new messages, here and then in other processes, once they are committed and the lock is free."""
    if on_news is not None:
        for text in news:
            on_news(text)
    if news and settings.listen:
        announce(connection, notify(settings.schema, *news))


def _tell_missing(half_ids: Sequence[UUID] | None) -> None:
    for half_id in half_ids or ():
        emit(HalfMissing(half_id=half_id))


def _append(connection: Connection, settings: Settings, *statements: Statement) -> Sequence[UUID]:
    """Run statements of which the first appends messages, under the lock; return the halves that can't be seen."""
    begin = plan_by_index(), COMMIT_SYNCHRONOUSLY, sql.begin_epoch(settings.schema)
    _, _, begun, ((*_, news, unseen),), *_ = execute(connection, *begin, *statements)
    if begun:
        after_commit(connection, partial(_tell, begun))
    if news and settings.listen:
        behind_commit(connection, notify(settings.schema, *news))
    return unseen or ()


def _tell(begun: list[Row]) -> None:
    for epoch, before, now in begun:
        emit(EpochBegun(epoch=epoch, log_before=before, log=now))


def release_due_once(
    connection: Connection, settings: Settings, *, limit: int | None = None, on_news: OnNews | None = None
) -> Counts:
    """Turn due scheduled messages into messages, in one transaction on ``connection``; and what a pause held.

    A topic that is paused holds what dispatch comes to, and what falls due: it waits in the schedule. Once the topic is
    resumed, that comes out in the order of the ops, and nothing new of the topic before it. ``on_news`` is called as by
    `dispatch_once`.

    Raises:
        HalvesHidden: as by `dispatch_once`.
    """
    most, name = settings.dispatch_batch if limit is None else limit, ("release", settings.schema)
    return by_size(connection, name, most, partial(_release, connection, settings, on_news))


def _release(connection: Connection, settings: Settings, on_news: OnNews | None, limit: int) -> Counts:
    schema = settings.schema
    # Messages first: a segment is made with their lock, and then waits for halves and ops, which the next one reads.
    _, begun, (of_due,), paused, (of_held,), _ = _in_turn(
        connection,
        schema,
        sql.begin_epoch_in_turn(schema),
        sql.appending(settings, limit, sql.RELEASE_DUE),
        sql.hold_due(schema, limit=limit),
        sql.appending(settings, limit, sql.RELEASE_HELD),
        sql.end_pauses(schema),
    )
    (due, messages, _, news, unseen), (held, released, _, news_held, unseen_held) = of_due, of_held
    _tell(begun)
    _pass_on(connection, settings, list(dict.fromkeys([*(news or ()), *(news_held or ())])), on_news)
    _tell_missing([*(unseen or ()), *(unseen_held or ())])
    more = limit in {due, held, len(paused)}
    return Counts(taken=due + held, done=messages + released, more=more)


def resend(
    connection: Connection,
    settings: Settings,
    sends: Mapping[UUID, int],
    *,
    actor: str,
    reason: str,
    origin: Mapping[str, str] | None = None,
) -> None:
    """Append dispatched messages once more, each under its id, in the caller's transaction.

    ``sends`` has the newest send number of each, read under the lock of `newest_sends`. The caller has also seen, after
    that lock, that none was compensated: a group that had passed such a message without a trace would take it now. A
    group that has consumed a message does nothing; one that has parked or failed it tries again. ``origin`` says by
    which interface the act came.
    """
    if not sends:
        return
    unseen = _append(
        connection,
        settings,
        sql.appending(settings, len(sends), sql.RESEND, half_ids=list(sends)),
        *(
            database_sql.audit(
                settings.schema, actor, "resend", str(half_id), reason, {"send_number": sent + 1}, origin
            )
            for half_id, sent in sends.items()
        ),
    )
    if unseen:
        raise HalfNotFound(unseen[0])


def newest_sends(connection: Connection, settings: Settings, half_ids: Sequence[UUID]) -> dict[UUID, int]:
    """Return the newest send number of those that are messages; until the transaction ends, it stays the newest.

    The caller's transaction, which must be READ COMMITTED, keeps all others from sending and pruning them.
    """
    _, rows = execute(
        connection, take_lock(dispatch_lock(settings.schema)), sql.lock_sends(settings.schema, list(half_ids))
    )
    return dict(rows)


def dispatch_passed(
    connection: Connection, settings: Settings, half_ids: Sequence[UUID], *, actor: str, reason: str
) -> tuple[list[UUID], list[UUID]]:
    """Make the messages of committed ops that dispatch has passed and that have none, in the caller's transaction.

    That should never be; but an operator may have deleted a message, or restored a table. An op that dispatch has yet
    to come to must be left to it: the message which it makes then would be the second one of its send, the unique index
    refuses that, and dispatch would stand still at this batch for ever. So no worker may dispatch meanwhile, and it is
    the cursor that tells; while a backlog is cut, or a re-base is under way, it doesn't tell enough.

    Returns the ids that were placed (or scheduled, if they are to be delivered later), and those that dispatch or
    release will come to by itself. The others need nothing: they are messages, scheduled, recalled, rolled back or
    compensated. The transaction must be READ COMMITTED: the cursor is to be that of after the lock.
    """
    _, cursors = execute(connection, take_lock(dispatch_lock(settings.schema)), sql.newest_cursor(settings.schema))
    next_xid, in_flight = "0", []  # dispatch has passed none
    if cursors and not (cursor := sql.Cursor(*cursors[0])).restored and cursor.until_sequence is None:
        next_xid, in_flight = cursor.next_xid, cursor.in_flight
    undispatched = sql.lock_undispatched(
        settings.schema, half_ids=list(half_ids), next_xid=next_xid, in_flight=in_flight
    )
    (rows,) = execute(connection, undispatched)
    passed = [half_id for half_id, is_passed in rows if is_passed]
    if passed:
        audits = (database_sql.audit(settings.schema, actor, "dispatch", str(half_id), reason) for half_id in passed)
        append = sql.appending(settings, len(passed), sql.APPEND_THESE, half_ids=passed)
        _append(connection, settings, append, *audits)
    return passed, [half_id for half_id, is_passed in rows if not is_passed]


#: Makes messages, and what is called when others tell of ops.
Making = tuple["Callable[[Connection], Counts]", "Callable[[], object] | None"]


def _dispatching(at: Post, on_news: OnNews) -> Making:
    dispatcher = Dispatcher(at.settings, on_news, awake=True, durable=not at.consumes)
    return dispatcher.once, dispatcher.nudge


def _releasing(at: Post, on_news: OnNews) -> Making:
    return lambda connection: release_due_once(connection, at.settings, on_news=on_news), None


def _tasks(at: Post, name: str, making: Callable[[Post, OnNews], Making], every: float) -> Iterator[Task]:
    """Have messages made, and those consumers woken that they are for."""
    arrived: list[str] = []

    def pass_on(news: str) -> None:
        arrived.append(news)
        at.wake_consumers(news)

    def wake() -> None:
        # Of a pass that failed it isn't known what it has made.
        if not arrived:
            at.wake_consumers(None)
        arrived.clear()

    make, on_ops = making(at, pass_on)
    how: Any = {"lane": "dispatch", "eager": True, "on_ops": on_ops, "parts": ("producer",)}
    yield Task(name=name, one_pass=lambda connection, *_: make(connection), every=every, after=wake, **how)


DUTIES = (
    Duty(
        "dispatch",
        "Makes messages of committed ops.",
        f"""
        producer: worker
        {APPEND}
        INSERT ON topic_growth topic_total
        UPDATE ON op_message
        SELECT(half_id) INSERT ON scheduled_message
        SELECT ON topic_pause
        """,
        role="dispatch",
        tasks=lambda at: _tasks(at, "dispatch", _dispatching, at.settings.idle_wait),
    ),
    Duty(
        "release",
        "Makes messages of what was due later, when its time has come.",
        f"""
        producer: worker
        {APPEND}
        SELECT INSERT UPDATE DELETE ON scheduled_message
        SELECT DELETE ON topic_pause
        """,
        role="release",
        tasks=lambda at: _tasks(at, "release", _releasing, at.settings.release_interval),
    ),
)
