"""`Admin`: all that an operator can see and do, over the registered databases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.operator import acts
from outbox.operator.bulk import order, preview, show
from outbox.operator.databases import Databases
from outbox.operator.health import overview, system, workers
from outbox.operator.look import audit, inbox, message, messages, scheduled
from outbox.operator.look import inbox as dead
from outbox.operator.look import scheduled as halves
from outbox.operator.look.redact import Redactor
from outbox.operator.model import (
    Action,
    Actor,
    AuditFilter,
    AuditRow,
    BulkItem,
    BulkJob,
    DeadGroup,
    HalfFilter,
    HalfRow,
    HandlerRow,
    InboxFilter,
    InboxRow,
    MessageFilter,
    MessageRow,
    MessageView,
    Overview,
    Page,
    PageRequest,
    Preview,
    ScheduledFilter,
    ScheduledRow,
    Selector,
    System,
    Target,
    WorkerRow,
)

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from outbox.settings import Settings


class Admin:
    """See and act, over one or more databases.

    ``redactor`` says how bodies are shown. Acts are recorded in ``audit``, in the transaction in which they are done;
    each needs a reason where the table of `Action` has one that can't be taken back.

    Every list takes a `PageRequest` and goes from the newest to the oldest (undecided halves and scheduled messages:
    the other way), over all registered databases unless its filter names one.

    Raises (all of its methods):
        InvalidRequest: a filter, token, selector or option that isn't one.
        UnknownDatabase: no database of the name that a filter names.
        sqlalchemy.exc.DBAPIError: a database can't be reached, or a statement took too long.
    """

    def __init__(self, databases: Databases, *, redactor: Redactor | None = None) -> None:
        self.databases = databases
        self.redactor = redactor or Redactor()

    @classmethod
    def open(cls, engines: Mapping[str, Engine], settings: Settings, *, redactor: Redactor | None = None) -> Admin:
        """Return an admin over these engines, after a look at each database.

        Raises:
            SchemaMissing, SchemaOutdated: one has no outbox tables, or not those of this code.
        """
        return cls(Databases.open(engines, settings), redactor=redactor)

    # --- see -------------------------------------------------------------------------------------------------

    def overview(self, window: str = "1h") -> Overview:
        """Return how things stand, with series over ``window``: 1h, 6h, 24h or 7d."""
        return overview.overview(self.databases, window)

    def messages(self, wanted: MessageFilter, page: PageRequest) -> Page[MessageRow]:
        """Return the newest messages of the producers that fit."""
        return messages.list_messages(self.databases, wanted, page)

    def message(self, message_id: UUID, *, reveal: Actor | None = None) -> MessageView:
        """Return all that is known of a message; with ``reveal`` its body unmasked, which is audited.

        Raises:
            MessageNotFound: nobody knows it.
        """
        return message.message(self.databases, message_id, self.redactor, reveal=reveal)

    def body(self, message_id: UUID) -> tuple[str, bytes]:
        """Return content type and bytes of a message as they are; whoever gives them on must have audited it.

        Raises:
            MessageNotFound: no producer's database has it.
        """
        return message.raw_body(self.databases, message_id)

    def inbox(self, wanted: InboxFilter, page: PageRequest) -> Page[InboxRow]:
        """Return the inbox rows that fit, the newest id first."""
        return inbox.list_inbox(self.databases, wanted, page)

    def dead_groups(self, *, database: str | None = None, group: str | None = None, topic: str | None = None,
                    limit: int = 200) -> list[DeadGroup]:  # fmt: skip
        """Return the parked messages by group, topic and kind of error, the biggest first."""
        return dead.groups(self.databases, database=database, group=group, topic=topic, limit=limit)

    def halves(self, wanted: HalfFilter, page: PageRequest) -> Page[HalfRow]:
        """Return undecided halves, the oldest first."""
        return halves.list_halves(self.databases, wanted, page)

    def scheduled(self, wanted: ScheduledFilter, page: PageRequest) -> Page[ScheduledRow]:
        """Return scheduled messages, the next due first; recalled ones the newest first."""
        return scheduled.list_scheduled(self.databases, wanted, page)

    def audit(self, wanted: AuditFilter, page: PageRequest) -> Page[AuditRow]:
        """Return what operators did, the newest first."""
        return audit.list_audit(self.databases, wanted, page)

    def workers(self) -> list[WorkerRow]:
        """Return the workers that run or were not ended in order."""
        return workers.workers(self.databases)

    def handlers(self) -> list[HandlerRow]:
        """Return what is registered on the living workers."""
        return workers.handlers(self.databases)

    def system(self) -> System:
        """Return what all of this runs on."""
        return system.system(self.databases)

    # --- act -------------------------------------------------------------------------------------------------

    def act(
        self,
        action: Action,
        target: Target,
        *,
        actor: Actor,
        reason: str,
        options: Mapping[str, Any] | None = None,
        version: str | None = None,
        database: str | None = None,
    ) -> str:
        """Do one thing to one message, and say in a sentence what came of it.

        ``version`` is that of the `MessageView` which the actor saw; None doesn't ask. ``options``: ``force`` for
        ``commit`` of a fenced half. A compensation isn't done here, but with `start`.

        Raises:
            MessageNotFound: nobody knows it.
            ActRefused: it isn't in a state in which this can be done.
            VersionMismatch: it has changed meanwhile.
            InvalidRequest: no reason where one is needed, a group that is missing, an option that isn't known.
        """
        return acts.act(
            self.databases,
            action,
            target,
            actor=actor,
            reason=reason,
            options=options or {},
            version=version,
            database=database,
        )

    def preview(
        self,
        action: Action,
        selector: Selector,
        *,
        database: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Preview:
        """Return what a bulk job would do; writes nothing.

        Raises:
            BulkJobTooLarge: it matches more than 100,000 messages, or names more than 1,000.
        """
        return preview.preview(self.databases, action, selector, database=database, options=options or {})

    def start(
        self,
        action: Action,
        selector: Selector,
        *,
        actor: Actor,
        reason: str,
        token: str | None = None,
        database: str | None = None,
        options: Mapping[str, Any] | None = None,
        rate: float | None = None,
        idempotency_key: str | None = None,
    ) -> BulkJob:
        """Order a bulk job, which workers carry out; each item is acted on as by `act`.

        ``token`` is that of the `preview`, and needed where a filter selects. ``rate`` is items a second at most.
        The same ``idempotency_key`` returns the bulk job ordered with it before. ``options`` of a compensation:
        ``acknowledge_delivered`` where the message took effect already.

        Raises:
            SelectorChanged: the preview showed something else, or the key was used for something else.
            BulkJobTooLarge: too many messages.
            ActRefused: nothing of what was named can be acted on.
            CompensationRefused: (a compensation of one message) it can't be compensated.
            MessageNotFound: nobody knows the messages.
        """
        return order.start(
            self.databases,
            action,
            selector,
            actor=actor,
            reason=reason,
            token=token,
            database=database,
            options=options or {},
            rate=rate,
            idempotency_key=idempotency_key,
        )

    def bulk_jobs(self, page: PageRequest, *, state: str | None = None, database: str | None = None) -> Page[BulkJob]:
        """Return bulk jobs, the newest first."""
        return show.list_bulk_jobs(self.databases, page, state=state, database=database)

    def bulk_job(self, bulk_job_id: UUID) -> BulkJob:
        """Return a bulk job.

        Raises:
            BulkJobNotFound: there is none of this id.
        """
        return show.bulk_job(self.databases, bulk_job_id)

    def bulk_items(self, bulk_job_id: UUID, page: PageRequest, *, state: str | None = None) -> Page[BulkItem]:
        """Return the items of a bulk job, in their order.

        Raises:
            BulkJobNotFound: there is none of this id.
        """
        return show.items(self.databases, bulk_job_id, page, state=state)

    def cancel(self, bulk_job_id: UUID, *, actor: Actor, reason: str = "") -> BulkJob:
        """Cancel what is left of a bulk job; what was done stays done.

        Raises:
            BulkJobNotFound: there is none of this id.
            ActRefused: it has finished already.
        """
        return order.cancel(self.databases, bulk_job_id, actor=actor, reason=reason)
