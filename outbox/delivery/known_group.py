"""What a producer declares: the groups that it waits for, and what it does when it has learnt of a message's fate."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import Engine

from outbox.consumer.subscription import Subscription, as_filter, as_header_filter
from outbox.database.engines import check_database
from outbox.database.session import CalledFunction, check_function
from outbox.database.time_limit import TimeLimit
from outbox.errors import InvalidHandler
from outbox.message.content import Codecs, check_group, check_seconds, check_topic
from outbox.message.model import Delivery, DeliveryStatus
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.compensate.compensation import Compensation
    from outbox.message.declared import CallbackDecorator, HeaderFilter
    from outbox.message.topic import Topic

#: Which callback learns of a message's fate.
CallbackKind = Literal["delivered", "undeliverable"]
#: By which status a callback is due.
CALLBACK_OF: Mapping[str, CallbackKind] = {
    DeliveryStatus.CONSUMED: "delivered",
    DeliveryStatus.PARKED: "undeliverable",
    DeliveryStatus.EXPIRED: "undeliverable",
    DeliveryStatus.RESEND_EXHAUSTED: "undeliverable",
}


@dataclass(frozen=True, slots=True)
class KnownGroup:
    """A group of a topic that the producer waits for.

    Its inbox is in the database ``consumer``, behind the status service at ``status_url``, or without either in the
    producer's own database. ``tags``, ``keys`` and ``headers`` are the filter that its consumer declares.

    Raises:
        InvalidHandler: both or something else than a database or URL are given, or a service without a token.
        InvalidMessage: topic or group aren't names.
    """

    topic: str
    group: str
    # URLs may hold passwords.
    consumer: Engine | AsyncEngine | str | None = field(default=None, repr=False)
    status_url: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    tags: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    headers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_group(self.group)
        what = f"known group {self.group!r} of {self.topic!r}"
        if self.consumer is not None and self.status_url is not None:
            raise InvalidHandler(f"{what}: give the consumer's database, or the URL of its status service, not both")
        if (self.status_url is None) != (self.token is None):
            raise InvalidHandler(f"{what}: status_url and token go together; the service answers no request without it")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token.strip()):
            raise InvalidHandler(f"{what}: the token must be of printable ASCII characters, as HTTP has it")
        if self.status_url is not None:
            _check_service(what, self.status_url)
        if self.consumer is not None:
            check_database(f"{what}: consumer", self.consumer)

    @classmethod
    def of(cls, subscription: Subscription) -> KnownGroup:
        """Return the group of a subscription that consumes in the producer's own database."""
        return cls(
            subscription.topic,
            subscription.group,
            tags=subscription.tags,
            keys=subscription.keys,
            headers=subscription.headers,
        )


def _check_service(what: str, url: str) -> None:
    if find_spec("httpx") is None:
        raise InvalidHandler(
            f"{what}: httpx asks the service, and isn't installed: pip install 'outbox-postgres[http]'"
        )
    scheme, _, rest = url.partition("://")
    if scheme not in {"http", "https"} or not rest:
        raise InvalidHandler(f"{what}: status_url must begin with https:// (or http://)")
    if "@" in rest.partition("/")[0]:
        raise InvalidHandler(f"{what}: status_url must name no user or password: the service asks for the token")


@dataclass(frozen=True, slots=True)
class DeliveryCallback(CalledFunction):
    """What the producer does when it has learnt of a message's fate: ``function(delivery, session)``, sync or async.

    ``model`` is the type that bodies are read as, ``codecs`` read those of other content types. ``timeout`` is how long
    (seconds) the function may take.

    Raises:
        InvalidHandler: the function can't be called so, or may take no time.
        InvalidMessage: the topic isn't a name.
    """

    topic: str
    kind: CallbackKind
    function: Callable[..., Any]
    model: Any = None
    codecs: Codecs = field(default_factory=Codecs, repr=False)
    timeout: float = 30.0
    limit: TimeLimit = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_topic(self.topic)
        what = f"on_{self.kind} of {self.topic!r}"
        check_function(f"{what}: the function", self.function, "delivery", "session")
        object.__setattr__(self, "limit", TimeLimit.checked(what, self.timeout))


class DeliveryDeclarations:
    """The part of an `Outbox` that declares what its producer learns of its messages."""

    subscriptions: dict[tuple[str, str], Subscription]
    known_groups: dict[tuple[str, str], KnownGroup]
    compensations: dict[str, Compensation]
    delivery_callbacks: dict[tuple[str, CallbackKind], DeliveryCallback]
    codecs: Codecs
    settings: Settings

    def _as_read(self, topic: str | Topic[Any], model: Any) -> tuple[str, Any]:
        raise NotImplementedError

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

    def on_delivered(
        self, topic: str | Topic[Any], *, model: Any = None, timeout: dt.timedelta | float | None = None
    ) -> CallbackDecorator[Delivery[Any]]:
        """Register what the producer does when a known group has consumed a message of ``topic``.

        ``callback(delivery, session)``, sync or async, is called by a worker in a transaction on this database, which
        also writes the delivery: once per message and group. What it raises undoes that, and it is called again in the
        next pass. Groups that consume ``topic`` by this Outbox in its own database are known by it; others are named to
        `known_group`.

        A call that takes longer than ``timeout`` (by default the setting ``callback_timeout``) has failed: it loses its
        connection, and with that all that it did.

        Raises:
            InvalidHandler: the topic has such a callback already, or the function can't be called so.
            InvalidMessage: the topic isn't a name, or ``timeout`` no length of time.
        """
        return self._callback(topic, "delivered", model, timeout)

    def on_undeliverable(
        self, topic: str | Topic[Any], *, model: Any = None, timeout: dt.timedelta | float | None = None
    ) -> CallbackDecorator[Delivery[Any]]:
        """Register what the producer does when a known group has parked a message, or has lost it for good.

        As `on_delivered`. An operator may yet retry a parked message, and it is delivered then: what must not happen to
        a message that takes effect is for a `compensation`, which quarantines it first.
        """
        return self._callback(topic, "undeliverable", model, timeout)

    def _callback(
        self, topic: str | Topic[Any], kind: CallbackKind, model: Any, timeout: dt.timedelta | float | None
    ) -> CallbackDecorator[Delivery[Any]]:
        name, model = self._as_read(topic, model)
        limit = self.settings.callback_timeout if timeout is None else check_seconds("timeout", timeout)

        def register(function: Any) -> Any:
            if (earlier := self.delivery_callbacks.get((name, kind))) is not None:
                raise InvalidHandler(f"topic {name!r} has an on_{kind} already: {earlier.name}")
            self.delivery_callbacks[name, kind] = DeliveryCallback(name, kind, function, model, self.codecs, limit)
            return function

        return register

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
                if key[0] == topic and subscription.source is None:
                    found.setdefault(key, KnownGroup.of(subscription))
            if not any(key[0] == topic for key in found):
                raise InvalidHandler(
                    f"no group of topic {topic!r} is known, so that {otherwise}; name one by "
                    f"outbox.known_group({topic!r}, group=..., consumer=...)"
                )
        return list(found.values())
