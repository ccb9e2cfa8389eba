"""What an application declares on its `Outbox`: topics, codecs, checkers, consumers, schedules, reconciliations."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from outbox.calling.callback import Callback, ParkedCallback
from outbox.calling.function import CalledFunction, CalledFunctions
from outbox.check.asker import Checker
from outbox.compensate.compensation import Compensation
from outbox.consumer.sql import topics_like
from outbox.consumer.subscription import Subscription, as_filter, as_header_filter, like
from outbox.database.execute import read_source
from outbox.delivery.callback import declare_callback
from outbox.delivery.known_group import CallbackKind, DeliveryCallback, KnownGroup
from outbox.errors import InvalidHandler
from outbox.message.content import Codec, Codecs, check_group, check_seconds, check_topic
from outbox.message.model import DeadLetter, Delivery, Message, Outgoing
from outbox.message.topic import Topic
from outbox.reconcile.record.timetable import Reconciliation
from outbox.relay.intake.intake import Intake, check_intake
from outbox.relay.published import PublishedTable
from outbox.relay.relay import RelayRule
from outbox.schedule.recurrence import Recurrence
from outbox.schedule.schedule import CronSchedule, Missed
from outbox.settings import Settings
from outbox.telemetry.hooks import Middleware, Registry

if TYPE_CHECKING:
    from pathlib import Path
    from uuid import UUID

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.message.content import Decoder, Encoder
    from outbox.message.declared import (
        CallbackDecorator,
        CheckerDecorator,
        CheckerOptions,
        CompensationOptions,
        ConsumerOptions,
        HandlerDecorator,
        HeaderFilter,
        OutsideBatchDecorator,
        OutsideBatchOptions,
        OutsideHandlerDecorator,
        OutsideOptions,
        RelayOptions,
        ScheduleDecorator,
        TopicOptions,
    )
    from outbox.relay.intake.source import IntakeSource, Received
    from outbox.relay.publisher import Publisher

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Declarations:
    """The part of an `Outbox` that takes declarations; no database is asked for any of them."""

    def __init__(self, group: str, settings: Settings | None) -> None:
        self.settings: Settings = settings or Settings.from_env()
        self.group: str = check_group(group)
        self.reconciliations: dict[str, Reconciliation] = {}
        self.topics: dict[str, Topic[Any]] = {}
        self.known_groups: dict[tuple[str, str], KnownGroup] = {}
        self.relays: list[RelayRule] = []
        self.intakes: list[Intake] = []
        self.codecs: Codecs = Codecs(self.settings.max_body_bytes)
        self.middlewares: Registry[Middleware] = Registry()
        self._declare_in(CalledFunctions())

    def _declare_in(self, functions: CalledFunctions) -> None:
        self.functions = functions
        self.subscriptions: dict[tuple[str, str], Subscription] = functions.of(Subscription)
        self.checkers: dict[str, Checker] = functions.of(Checker)
        self.compensations: dict[str, Compensation] = functions.of(Compensation)
        self.schedules: dict[str, CronSchedule] = functions.of(CronSchedule)
        self.delivery_callbacks: dict[tuple[str, CallbackKind], DeliveryCallback] = functions.of(DeliveryCallback)

    def _share_declarations(self, other: Declarations) -> None:
        """Take the declarations of another: those on either, now or later, count for both."""
        self._declare_in(other.functions)
        self.topics, self.known_groups, self.codecs = other.topics, other.known_groups, other.codecs
        self.reconciliations, self.middlewares = other.reconciliations, other.middlewares
        self.relays, self.intakes = other.relays, other.intakes

    @property
    def current(self) -> Declarations:
        """The one whose database the running handler works in: an `Outbox` knows it."""
        raise NotImplementedError

    def _send_reply(self, carrier: Any, topic: str, message: Outgoing) -> Any:
        """Send what a handler replies: an `Outbox` does."""
        raise NotImplementedError

    def use(self, middleware: Middleware) -> Callable[[], None]:
        """Put a middleware around all that this Outbox sends, and around each handler that is called for it.

        Also around its checkers, compensations and callbacks; and it gets the events of the workers that work for it.
        It counts for the tenants too (`Outbox.bound_to`). The first is outermost. What it raises is logged, and breaks
        nothing. Return the function that takes it away.

        Raises:
            InvalidHandler: it isn't a `Middleware`, or is in use already.
        """
        if not isinstance(middleware, Middleware):
            raise InvalidHandler(
                f"outbox.use takes an object of a class of outbox.Middleware, not {type(middleware).__name__}; a plain "
                "function is for add_hook, add_observer or add_send_hook of outbox.telemetry.hooks"
            )
        if middleware in self.middlewares.hooks:
            raise InvalidHandler(f"{middleware!r} is in use already")
        return self.middlewares.add(middleware)

    # --- bodies -------------------------------------------------------------------------------------------

    @overload
    def topic(self, topic: Topic[T]) -> Topic[T]: ...
    @overload
    def topic(self, topic: str, *, model: type[T], **options: Unpack[TopicOptions[T]]) -> Topic[T]: ...
    def topic(self, topic: Any, *, model: Any = None, **options: Any) -> Topic[Any]:
        """Declare what the bodies of a topic are, for all that is sent and read of it here; return the `Topic`.

        From here on a body is checked against ``model`` where it is sent, and read as it by consumers, checkers and
        compensations that name no model of their own. Where several services share a declaration, make a `Topic` in a
        module that they all import, and name it here. No database is asked. The options, ``version``,
        ``key`` and ``content_type``, are those of `Topic`.

        Raises:
            InvalidHandler: the topic is declared already, or has a function that was declared before it and would read
                plain JSON; or as `Topic`.
            InvalidMessage: the name or the content type isn't one.
        """
        declared = topic if isinstance(topic, Topic) else Topic(topic, model, **options)
        self._declare(declared)
        return declared

    def codec(
        self, content_type: str, *, encode: Encoder, decode: Decoder, show: Callable[[Any], Any] | None = None
    ) -> None:
        """Register how bodies of a content type become bytes and back, such as ``application/msgpack``.

        A body is encoded so where its sender (option ``content_type``) or its `Topic` says so, and decoded wherever it
        is read here. Console and commands show it as JSON: of what ``decode`` returns, or of what ``show`` makes of
        that. Bodies of a content type without a codec are bytes.

        Raises:
            InvalidHandler: there is a codec of this content type already, or it needs none; or a function isn't one.
            InvalidMessage: it isn't a content type.
        """
        self.codecs.register(Codec(content_type, encode, decode, show))

    def _declare(self, topic: Topic[Any]) -> None:
        if (earlier := self.topics.get(topic.name)) is topic:
            return
        if earlier is not None:
            raise InvalidHandler(f"topic {topic.name!r} is declared already, as {earlier!r}")
        for each in self.functions:
            if each.topic == topic.name and each.model is None:
                raise InvalidHandler(
                    f"topic {topic.name!r} has a {each.decorator} already, which would read plain JSON: declare the "
                    "topic before it"
                )
        self.topics[topic.name] = topic

    def _name_of(self, topic: str | Topic[Any]) -> str:
        raise NotImplementedError

    def _as_read(self, topic: str | Topic[Any], model: Any) -> tuple[str, Any]:
        """Return a topic's name and what its bodies are read as: the reader's model, or the topic with all versions."""
        name = self._name_of(topic)
        return name, self.topics.get(name) if model is None else model

    def _register(
        self, kind: type[CalledFunction], topic: str | Topic[Any], model: Any, **options: Any
    ) -> Callable[[F], F]:
        """Return the decorator that declares a function of a kind."""
        name, model = self._as_read(topic, model)

        def register(function: F) -> F:
            named = {"beside": self.functions, **options}
            declared = kind.declare(self.settings, name, function, model, self.codecs, **named)
            if isinstance(declared, Callback):
                declare_callback(self.functions, declared, self.settings, self._send_reply)
            else:
                self.functions.add(declared)
            return function

        return register

    # --- producer -----------------------------------------------------------------------------------------

    @overload
    def checker(
        self, topic: Topic[T], *, model: None = None, **options: Unpack[CheckerOptions]
    ) -> CheckerDecorator[T]: ...
    @overload
    def checker(self, topic: str, *, model: type[T], **options: Unpack[CheckerOptions]) -> CheckerDecorator[T]: ...
    @overload
    def checker(self, topic: str, *, model: Any = None, **options: Unpack[CheckerOptions]) -> CheckerDecorator[Any]: ...
    def checker(self, topic: str | Topic[Any], *, model: Any = None, **options: Unpack[CheckerOptions]) -> Any:
        """Register the function to ask whether the local transaction of an undecided half of ``topic`` committed.

        ``checker(orphan)`` or ``checker(orphan, session)``, sync or async, answers a `Resolution`. An exception, a
        time-out, None or anything else means UNKNOWN: it is asked again after ``interval``, and the half is parked
        after ``max_checks`` questions. What it writes with the session commits together with the verdict, or not at
        all. Without a session no transaction is open while it runs: the form for one that asks another service.

        Durations are timedeltas or seconds and default to the settings; ``immunity`` is for halves of the topic that
        name none of their own. Fenced halves need no checker.

        Raises:
            InvalidHandler: the topic has a checker already, the function can't be called so, or a rule can't work.
            InvalidMessage: the topic isn't a name, or a duration isn't one.
        """
        return self._register(Checker, topic, model, **options)

    @overload
    def compensation(
        self, topic: Topic[T], *, model: None = None, **options: Unpack[CompensationOptions]
    ) -> CallbackDecorator[Message[T]]: ...
    @overload
    def compensation(
        self, topic: str, *, model: type[T], **options: Unpack[CompensationOptions]
    ) -> CallbackDecorator[Message[T]]: ...
    @overload
    def compensation(
        self, topic: str, *, model: Any = None, **options: Unpack[CompensationOptions]
    ) -> CallbackDecorator[Message[Any]]: ...
    def compensation(
        self, topic: str | Topic[Any], *, model: Any = None, **options: Unpack[CompensationOptions]
    ) -> Any:
        """Register how the local transaction behind a message of ``topic`` is undone when that is ordered.

        ``compensation(message, session)``, sync or async, is called by a worker in a transaction on this database,
        which also records it: once per message ever. What it raises undoes all of that, and it is tried again. Before,
        the message is quarantined in this database and in those of ``consumers``, which must be all that have groups of
        the topic: it takes no effect any more. Where it did already, that is refused, unless it was ordered knowingly.

        An operator orders it; with ``when="parked"`` also a worker, for what a group that is known (`known_group`, or
        one that consumes the topic by this Outbox in its own database) has parked ``after`` (timedelta or seconds) ago.

        A call that takes longer than ``timeout`` (by default the setting ``compensation_timeout``) has failed: it loses
        its connection, and with that all that it did.

        Raises:
            InvalidHandler: the topic has a compensation already, or the function can't be called so.
            InvalidMessage: the topic isn't a name.
        """
        return self._register(Compensation, topic, model, **options)

    def on_parked(self, topic: str | Topic[Any], *, model: Any = None) -> CallbackDecorator[DeadLetter[Any]]:
        """Register a function to call when something of ``topic`` is parked: a message in a group, or a half message.

        ``function(letter, session)``, sync or async, is the handler of a group of the internal topic ``outbox.parked``,
        of which a message is written, in this database, in the transaction that parks: once for each message and group,
        and for each half. It is called in a transaction on this database with a `DeadLetter`, and retried and parked
        like any handler. Messages: of the groups that consume the topic by this Outbox, wherever they come from.
        Halves: those of this database. What an operator parks isn't told, nor what was parked before it is declared.

        It is there to tell a person, or to write it down: an operator may yet retry a parked message. What must undo
        the local transaction is a `compensation` with ``when="parked"``, which quarantines the message first.

        Raises:
            InvalidHandler: the topic has such a function already, or it can't be called so.
            InvalidMessage: the topic isn't a name.
        """
        return self._register(ParkedCallback, topic, model, app=self.group)

    def every(
        self,
        when: str | dt.timedelta | float,
        *,
        topic: str | Topic[Any],
        name: str | None = None,
        zone: str = "UTC",
        missed: Missed = "one",
        grace: dt.timedelta | float = 60.0,
        timeout: dt.timedelta | float = 30.0,
    ) -> ScheduleDecorator:
        """Register the function that makes the message of ``topic`` for each time of a schedule.

        ``function(at)`` or ``function(at, session)``, sync or async, returns the body, an `Outgoing`, or None to send
        nothing. It is called by a worker at the time, in the transaction that sends the message: one for each time,
        however many workers there are. ``at`` is the time, in ``zone``. The id of the message is made of the database,
        the topic, ``name`` (the function's, by default) and the time.

        ``when`` is a text with the five fields of cron, by the clocks of ``zone``; or a timedelta or seconds, counted
        from 1970 on. ``missed`` says what becomes of times that passed while no worker ran: ``one`` message for the
        newest of them, ``all``, or ``skip`` what is older than ``grace``. A schedule begins with its first time after
        a worker has met it; one whose ``when`` is changed begins anew. A call that takes longer than ``timeout`` has
        failed; the worker calls again a minute later.

        Raises:
            InvalidHandler: there is a schedule of this name, the name isn't one, or the function can't be called so.
            InvalidSettings: fields that can't be read, or that never come; no such time zone; an interval under 10 ms.
            InvalidMessage: the topic isn't a name, or a duration isn't one.
        """
        options = {"recurrence": Recurrence.of(when, zone), "schedule": name or "", "missed": missed}
        options |= {
            "grace": check_seconds("grace", grace),
            "timeout": check_seconds("timeout", timeout),
            "send": self._send_reply,
        }
        return self._register(CronSchedule, topic, None, **options)

    def _immunity_of(self, topic: str) -> float:
        checker = self.checkers.get(topic)
        return self.settings.immunity if checker is None else checker.immunity

    def known_group(
        self,
        topic: str | Topic[Any],
        *,
        group: str,
        consumer: Engine | AsyncEngine | str | None = None,
        status_url: str | None = None,
        token: str | None = None,
        tags: Collection[str] | None = None,
        keys: Collection[str] | None = None,
        headers: HeaderFilter | None = None,
    ) -> None:
        """Have workers ask what became of each message of ``topic`` in ``group``, and write it down (`delivery`).

        Where its inbox is: in the database ``consumer`` (an engine or URL), behind the service at ``status_url`` that
        the consumer mounts (`outbox.asgi.InboxStatusService`) and that knows ``token``, or else in this
        Outbox's own database. ``tags``, ``keys`` and ``headers`` are the filter that the group's consumer declares: a
        message that it leaves out isn't missed.

        Raises:
            InvalidHandler: the group is known already, or it isn't said where its inbox is.
            InvalidMessage: the topic or the group isn't a name.
        """
        topic, _ = self._as_read(topic, None)
        if (topic, group) in self.known_groups:
            raise InvalidHandler(f"group {group!r} of topic {topic!r} is known already")
        self.known_groups[topic, group] = KnownGroup(
            topic, group, consumer, status_url, token, as_filter(tags), as_filter(keys), as_header_filter(headers)
        )

    def on_delivered(self, topic: str | Topic[Any], *, model: Any = None) -> CallbackDecorator[Delivery[Any]]:
        """Register what the producer does when a known group has consumed a message of ``topic``.

        ``callback(delivery, session)``, sync or async, is the handler of a group of the internal topic
        ``outbox.delivered``, of which a message is written in the transaction in which the delivery becomes known: once
        for a message and a group. It is called in a transaction on this database, and retried and parked like any
        handler; in the order of a message's fates. What is known before it is declared isn't told. Groups that consume
        ``topic`` by this Outbox in its own database are known by it; others are named to `known_group`.

        Raises:
            InvalidHandler: the topic has such a callback already, or the function can't be called so.
            InvalidMessage: the topic isn't a name.
        """
        return self._register(DeliveryCallback, topic, model, fate="delivered", app=self.group)

    def on_undeliverable(self, topic: str | Topic[Any], *, model: Any = None) -> CallbackDecorator[Delivery[Any]]:
        """Register what the producer does when a known group has parked a message, or has lost it for good.

        As `on_delivered`. An operator may yet retry a parked message, and it is delivered then: what must not happen to
        a message that takes effect is for a `compensation`, which quarantines it first.
        """
        return self._register(DeliveryCallback, topic, model, fate="undeliverable", app=self.group)

    def groups_to_confirm(self) -> list[KnownGroup]:
        """Return the groups that are known now: those that were named, and for topics that need one, its own ones.

        Raises:
            InvalidHandler: a topic has a callback, or compensates parked messages, and no group of it is known.
        """
        found = dict(self.known_groups)
        needed = [(topic, f"its on_{kind} would never be called") for topic, kind in self.delivery_callbacks]
        needed += [
            (topic, "nothing would be compensated when it is parked")
            for topic, each in self.compensations.items()
            if each.when == "parked"
        ]
        for topic, otherwise in needed:
            for key, subscription in self.subscriptions.items():
                if key[0] == topic and None in subscription.sources:
                    found.setdefault(key, KnownGroup.of(subscription))
            if not any(key[0] == topic for key in found):
                raise InvalidHandler(
                    f"no group of topic {topic!r} is known, so that {otherwise}; name one by "
                    f"outbox.known_group({topic!r}, group=..., consumer=...)"
                )
        return list(found.values())

    # --- consumer -----------------------------------------------------------------------------------------

    @overload
    def consumer(
        self,
        topic: Topic[T],
        *,
        takes_batch: Literal[True],
        transactional: Literal[False],
        **options: Unpack[OutsideBatchOptions],
    ) -> OutsideBatchDecorator[T]: ...
    @overload
    def consumer(
        self,
        topic: str,
        *,
        model: Any = None,
        takes_batch: Literal[True],
        transactional: Literal[False],
        **options: Unpack[OutsideBatchOptions],
    ) -> OutsideBatchDecorator[Any]: ...
    @overload
    def consumer(
        self, topic: Topic[T], *, transactional: Literal[False], **options: Unpack[OutsideOptions]
    ) -> OutsideHandlerDecorator[T]: ...
    @overload
    def consumer(
        self, topic: str, *, model: type[T], transactional: Literal[False], **options: Unpack[OutsideOptions]
    ) -> OutsideHandlerDecorator[T]: ...
    @overload
    def consumer(
        self, topic: str, *, model: Any = None, transactional: Literal[False], **options: Unpack[OutsideOptions]
    ) -> OutsideHandlerDecorator[Any]: ...
    @overload
    def consumer(
        self, topic: Topic[T], *, takes_batch: Literal[True], **options: Unpack[ConsumerOptions]
    ) -> HandlerDecorator[list[Message[T]]]: ...
    @overload
    def consumer(
        self, topic: Topic[T], *, takes_batch: Literal[False] = False, **options: Unpack[ConsumerOptions]
    ) -> HandlerDecorator[Message[T]]: ...
    @overload
    def consumer(
        self, topic: str, *, model: type[T], takes_batch: Literal[True], **options: Unpack[ConsumerOptions]
    ) -> HandlerDecorator[list[Message[T]]]: ...
    @overload
    def consumer(
        self, topic: str, *, model: type[T], takes_batch: Literal[False] = False, **options: Unpack[ConsumerOptions]
    ) -> HandlerDecorator[Message[T]]: ...
    @overload
    def consumer(
        self, topic: str, *, model: Any = None, takes_batch: Literal[True], **options: Unpack[ConsumerOptions]
    ) -> HandlerDecorator[list[Message[Any]]]: ...
    @overload
    def consumer(
        self, topic: str, *, model: Any = None, takes_batch: Literal[False] = False, **options: Unpack[ConsumerOptions]
    ) -> HandlerDecorator[Message[Any]]: ...
    def consumer(self, topic: str | Topic[Any], *, model: Any = None, **options: Any) -> Any:
        """Register a handler, ``handler(message, session)``, sync or async, as a group of a topic.

        The annotation of its second parameter says what it gets instead of a session: a Connection of SQLAlchemy's or a
        Cursor of psycopg's, for an async one an AsyncConnection or an AsyncCursor, in the same transaction.

        With ``transactional=False`` it is ``handler(message)``, for effects outside of this database: it is called at
        least once, ``concurrency`` of them at once in each worker, and a call that takes longer than ``timeout``
        (seconds; 30 by default) has failed. ``message.id`` is the idempotency key for whatever it calls. With
        ``takes_batch`` it is ``handler(messages)``, and returns None or a list with an answer for each.

        Otherwise the session is in the transaction that also writes the inbox row and the offset, so the effect on this
        database is exactly once. Returning None is success; raising is a failure, and so is returning `Retry`, `Park`,
        `Skip`, `Unavailable`, which undo what the handler did, or anything else, which is no answer. The options are
        those of `Subscription`; ``rate`` also as "100/s", "30/min" or "5/h".

        Raises:
            InvalidHandler: the group has a handler for this topic already, an option that can't work, or a parameter
                that is annotated as something else.
            InvalidMessage: the topic or the group isn't a name.
        """
        return self._register(Subscription, topic, model, send_reply=self._send_reply, **options)

    def relay(
        self,
        topics: str | Topic[Any] | Sequence[str | Topic[Any]],
        *,
        to: Publisher | PublishedTable,
        **options: Unpack[RelayOptions],
    ) -> None:
        """Have workers publish the messages of topics, of this database, ``to`` a broker, an endpoint or a table.

        A topic's name may have ``*``: then also topics that come later are relayed. It is a group like any other
        (``group``; by default ``relay-`` and the publisher's name), whose offset moves when the destination has
        confirmed. ``ordered="key"`` (by default): a message of a key is published when the one before is; one that the
        destination refuses for itself is parked, and its key goes on, or (``on_exhausted="park"``) waits. Where the
        destination isn't there, nothing is lost and no attempt is used up: the group's breaker opens. Up to ``batch``
        messages are published in one call, ``concurrency`` calls run at once. The other options are those of
        `consumer`. Into a table (`outbox.relay.PublishedTable`) the messages of a batch are written with the offset.

        Raises:
            InvalidHandler: the group has one of these topics already, or an option can't work.
            InvalidMessage: a topic or the group isn't a name.
        """
        several = [topics] if isinstance(topics, str | Topic) else topics
        rule = RelayRule.of([self._name_of(topic) for topic in several], to, **options)
        for topic in rule.named:
            relayed(self, rule, topic)
        if rule.patterns:
            self.relays.append(rule)

    def intake(
        self,
        topic: str | Topic[Any],
        *,
        source: IntakeSource,
        broker_retention: dt.timedelta | float | None = None,
        id_from: Callable[[Received], UUID | str] | None = None,
        complete: bool = True,
    ) -> None:
        """Have workers take messages of a broker in, as messages of ``topic`` of this database.

        The broker is told when they are stored; consumers of the topic know nothing of it. The id is that of
        CloudEvents, if it has one; else it follows from where the broker has the message, or from
        ``id_from(received)``, a UUID or a business string. So what comes again is stored once, as long as it is known:
        ``broker_retention`` (timedelta or seconds) is how long the broker keeps messages, and may deliver them again;
        where it is said, it is checked.
        What can't be a message here (a key that is too long, headers, the first part of a body that is too large) is
        stored as its bytes, with the header ``intake-refused``. Of messages that a relay has published, positions that
        don't come are told (`IntakeGap`, and the doctor's ``intake.gap``), unless the source has a part of its topics
        only: then say ``complete=False``.

        Raises:
            InvalidHandler: it is no source, or that of another intake; or ``broker_retention`` is longer than the
                setting ``inbox_retention``.
            InvalidMessage: the topic isn't a name, or the duration isn't one.
        """
        name, _ = self._as_read(topic, None)
        declared = Intake(check_topic(name), source, self._send_reply, id_from, self.settings.max_body_bytes, complete)
        retention = self.settings.inbox_retention
        self.intakes.append(check_intake(declared, self.intakes, retention, broker_retention))

    def reconciliation(
        self,
        name: str = "nightly",
        *,
        at: str | None = None,
        cron: str | None = None,
        every: dt.timedelta | float | None = None,
        timezone: str = "UTC",
        job: Mapping[str, Any] | None = None,
        config: Path | str | None = None,
        report: Callable[[Any], object] | None = None,
        fleet: Path | str | None = None,
        follows: dt.timedelta | float | bool = False,
    ) -> None:
        """Have a worker reconcile what this Outbox consumes, with the databases that it comes from, by a timetable.

        When: ``at="03:00"`` each day, by the five fields of ``cron``, or ``every`` timedelta or seconds; one of many
        workers runs it, by the database's clock. One that was missed is made up for at the next start; the first one
        is due at once. How: ``job``, a mapping such as a TOML file has, or that file (``config``, which ``job``
        overrides); by default all consumers, without repairs. ``report`` gets each `outbox.reconcile.rows.JobResult`.
        Its findings are in ``outbox reconcile runs``.

        ``fleet`` has it compare many services' databases in place of what this Outbox consumes: the file or folder of
        ``outbox reconcile fleet``. Then ``report`` gets each `outbox.reconcile.fleet.run.FleetResult`, and this
        database records that it was run; the findings are recorded in those of the consumers.

        Or without an end: ``follows=True`` compares messages that are new, due or touched every 20 seconds (or so many
        seconds), and tells each difference when it is found, and when it is gone; ``report`` gets each
        `outbox.reconcile.follow.follower.PassResult`. A later falsification is found by another one by night.

        Raises:
            InvalidHandler: there is one of this name.
            InvalidSettings: a timetable that can't be. Faults of the job are told when the worker starts.
        """
        if name in self.reconciliations:
            raise InvalidHandler(f"there is a reconciliation {name!r} already; a second one needs a name of its own")
        self.reconciliations[name] = Reconciliation(
            name, at, cron, every, timezone, job, config, report, fleet, follows
        )


def relayed(declarations: Declarations, rule: RelayRule, topic: str) -> Subscription:
    """Return what the group of a relay consumes of a topic, which is declared if it isn't yet.

    Raises:
        InvalidHandler: it is named, and the group has it already.
    """
    key = topic, rule.group
    if not rule.patterns or key not in declarations.subscriptions:
        options = {**rule.options, "group": rule.group, "at_end": rule.publisher.close}
        handler = rule.handler(lambda: declarations.current.settings.schema)
        declarations._register(Subscription, topic, None, **options)(handler)
    return declarations.subscriptions[key]


def topics_to_relay(connection: Connection, schema: str, rule: RelayRule) -> list[str]:
    """Return the topics of a database that a relay takes by a pattern."""
    found = read_source(connection, topics_like(schema, patterns=[like(pattern) for pattern in rule.patterns]))[0]
    return [topic for (topic,) in found if rule.takes(topic)]
