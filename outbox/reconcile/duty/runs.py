"""The group that handles the messages by which runs of one reconciliation are asked for, in a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outbox.consumer.outside.calls import CallContext
from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.consumer.subscription import Subscription
from outbox.message.model import Counts, Message, Park, Retry
from outbox.reconcile.record.requests import TOPIC, RunRequest
from outbox.text import topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.duty import ServedOutbox
    from outbox.reconcile.duty.reconciliation import FleetReconciler, JobReconciler

#: The longest time (seconds) of a run: one that takes longer is begun again beside it.
LONGEST = 86_400.0
#: A message that no run could be begun for is tried again after so many seconds, as often as a day has room for.
_AGAIN = 600.0


class Runs:
    """Runs what messages ask for of one reconciliation; its calls are the passes of a duty, which last as long."""

    def __init__(
        self,
        name: str,
        reconcilers: Sequence[JobReconciler | FleetReconciler],
        outbox: ServedOutbox,
        stopping: threading.Event,
        at_end: Callable[[Callable[[], object]], object],
    ) -> None:
        self.name: str = f"run {name}"
        self._all = reconcilers
        self._reconcilers: dict[tuple[str, str], JobReconciler | FleetReconciler] = {}
        subscription = Subscription(
            TOPIC,
            self.handle,
            None,
            outbox.codecs,
            group=name,
            about=TOPIC,
            keys=(name,),
            retry_delays=(_AGAIN,) * int(86_400 / _AGAIN),
            transactional=False,
            timeout=LONGEST,
        )
        self._consumer = OutsideConsumer(
            subscription, outbox.settings, stopping.is_set, context=CallContext(outbox.active), retries=True
        )
        self._has_started = self._knows_all = False
        at_end(self._consumer.end)

    def __call__(self, connection: Connection, source: Connection) -> Counts:
        """Handle the messages that are there, one after the other."""
        located = [each for each in self._all if each.locate()]
        self._knows_all = len(located) == len(self._all)
        # An operator may have ordered by the topic, before this worker knew the feed.
        by_topic = {(topic_of(topic), group): each for each in located for topic, group in each.pairs[:1]}
        self._reconcilers = by_topic | {each.pairs[0]: each for each in located}
        if not self._has_started:
            self._consumer.start(connection, source)
            self._has_started = True
        return self._consumer.consume_once(connection, source)

    def handle(self, message: Message) -> Park | Retry | None:
        """Run what a message asks for."""
        request = RunRequest.of(message.body)
        if (reconciler := self._reconcilers.get(request.pair)) is not None:
            reconciler.handle(message.id, request)
        elif not self._knows_all:  # it may be of one whose group hasn't read from its source yet
            return Retry(_AGAIN)
        elif request.by is not None:
            return Park(
                f"reconciliation {request.schedule!r} doesn't compare {request.topic} with {request.group} any more"
            )
        # Its timetable goes on with the pairs that it has now.
        return None
