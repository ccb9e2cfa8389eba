"""What operators and deployments do with an `Outbox`: each act in a transaction of its own.

The acts are imported when they are done: services, which only send and consume, don't pay for them at their start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from outbox.database.execute import execute
from outbox.dispatch.sql import declare_topic, topic_queues
from outbox.errors import CheckRefused, InvalidHandler, TransactionRequired
from outbox.message.limits import check_topic
from outbox.message.model import Answer, Decision, Resolution
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.check.checker import Checker
    from outbox.database.runner import NewRunner, Runner

T = TypeVar("T")


class BulkJobs:
    """The acts of an `Outbox` that aren't part of a service's own transactions."""

    engine: Engine | AsyncEngine
    settings: Settings
    checkers: dict[str, Checker]

    def declare_topic(self, name: str, queues: int) -> None:
        """Create a topic with so many queues, or give it more (never fewer: messages may wait in them).

        More queues move keys to other queues: what a key sent before and after is not ordered across the change.
        """
        check_topic(name)
        if not 1 <= queues <= 4096:
            raise InvalidHandler(f"topic {name!r}: queues = {queues} must be between 1 and 4096")

        def declare(connection: Connection) -> int:
            _, ((now,),) = execute(
                connection,
                declare_topic(self.settings.schema, name, queues),
                topic_queues(self.settings.schema, name),
            )
            if now > queues:
                raise InvalidHandler(f"topic {name!r} has {now} queues already and can't shrink to {queues}")
            return int(now)

        self._own_transaction(declare)

    def resend(self, half_ids: Sequence[UUID], *, actor: str, reason: str) -> int:
        """Append dispatched messages once more under their ids; return how many. Inboxes that know them do nothing."""
        from outbox.dispatch import once  # noqa: PLC0415

        return self._own_transaction(
            lambda connection: once.resend(connection, self.settings, half_ids, actor=actor, reason=reason)
        )

    def recall(self, half_id: UUID, *, actor: str, reason: str = "") -> None:
        """Take back a scheduled message before it is due.

        Raises:
            HalfNotFound: no half message has this id.
            RecallRefused: it is out already, was never scheduled, isn't committed, or was recalled before.
        """
        from outbox.dispatch import once  # noqa: PLC0415

        self._own_transaction(
            lambda connection: once.recall(connection, self.settings, half_id, actor=actor, reason=reason)
        )

    def retry(self, group: str, message_id: UUID, *, actor: str, reason: str) -> None:
        """Give a parked message back to its group, with all its attempts.

        Raises:
            NotParked: the message isn't parked in this group.
        """
        from outbox.operator import undecided  # noqa: PLC0415

        self._own_transaction(
            lambda connection: undecided.retry(
                connection, self.settings.schema, group, message_id, actor=actor, reason=reason
            )
        )

    def resolve(
        self, half_id: UUID, resolution: Resolution, *, actor: str, reason: str, force: bool = False
    ) -> Decision:
        """Decide an undecided half message by hand, parked or not; COMMIT or ROLLBACK.

        Raises:
            AlreadyCommitted, AlreadyRolledBack: somebody decided otherwise before.
            DecisionRefused: no reason; or, without ``force``, a fenced half would be committed, whose business change
                isn't.
            HalfNotFound: no half message has this id.
        """
        from outbox.operator import undecided  # noqa: PLC0415

        return self._own_transaction(
            lambda connection: undecided.resolve(
                connection, self.settings, half_id, resolution, actor=actor, reason=reason, force=force
            )
        )

    def reset_checks(self, half_id: UUID, *, actor: str, reason: str) -> None:
        """Set the counter of an undecided half back and have it checked by the next pass (RocketMQ: resume).

        Raises:
            AlreadyCommitted, AlreadyRolledBack, HalfNotFound: it isn't undecided.
            DecisionRefused: no reason.
        """
        from outbox.operator import undecided  # noqa: PLC0415

        self._own_transaction(
            lambda connection: undecided.reset(connection, self.settings, half_id, actor=actor, reason=reason)
        )

    def request_check(self, half_id: UUID, *, actor: str, reason: str) -> None:
        """Have the next pass of a worker check an undecided half; one that is parked exactly once more.

        Raises:
            AlreadyCommitted, AlreadyRolledBack, HalfNotFound: it isn't undecided.
            DecisionRefused: no reason.
        """
        from outbox.operator import undecided  # noqa: PLC0415

        self._own_transaction(
            lambda connection: undecided.request_check(connection, self.settings, half_id, actor=actor, reason=reason)
        )

    def check_now(self, half_id: UUID, *, actor: str, reason: str, new_runner: NewRunner | None = None) -> Answer:
        """Check an undecided half here and now, parked or not, and return what came of it.

        ``new_runner`` makes the connections for the checker, given whether it is async; by default they come from the
        engine, for plain checkers only.

        Raises:
            AlreadyCommitted, AlreadyRolledBack, HalfNotFound: it isn't undecided.
            CheckRefused: no checker is registered for its topic, or it is being asked or decided at this moment.
            DecisionRefused: no reason.
        """
        from outbox.check.asker import Asker  # noqa: PLC0415
        from outbox.database.runner import EngineRunner  # noqa: PLC0415
        from outbox.operator import undecided  # noqa: PLC0415

        engine = self._sync_engine()

        def plain(is_async: bool) -> Runner:
            if is_async:
                raise CheckRefused("an async checker needs an event loop: use request_check, and let a worker ask")
            return EngineRunner(engine)

        asker = Asker(new_runner or plain, 1)
        try:
            with engine.connect() as connection:
                return undecided.check_now(
                    connection, self.settings, self.checkers, asker, half_id, actor=actor, reason=reason
                )
        finally:
            asker.end()

    def compensate(self, message_id: UUID, *, actor: str, reason: str, acknowledge_delivered: bool = False) -> UUID:
        """Order that the local transaction behind a message be rolled back; return the id of the bulk job.

        A worker that has the `compensation` of the topic quarantines the message at its consumers, runs it, and says in
        the bulk job what came of it. Where the message took effect already, that is refused then, unless
        ``acknowledge_delivered``.

        Raises:
            CompensationRefused: the half isn't committed, was compensated, or is about to be; or no reason.
        """
        from outbox.compensate.request import request  # noqa: PLC0415

        return self._own_transaction(
            lambda connection: request(
                connection,
                self.settings,
                [message_id],
                actor=actor,
                reason=reason,
                acknowledge_delivered=acknowledge_delivered,
            )
        )

    def _own_transaction(self, act: Callable[[Connection], T]) -> T:
        with self._sync_engine().begin() as connection:
            return act(connection)

    def _sync_engine(self) -> Engine:
        from sqlalchemy import Engine  # noqa: PLC0415

        if not isinstance(self.engine, Engine):
            raise TransactionRequired(
                "this Outbox is bound to an AsyncEngine; for acts outside of a transaction make one on a sync engine: "
                "Outbox(create_engine(url))"
            )
        return self.engine
