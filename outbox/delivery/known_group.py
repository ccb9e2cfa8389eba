"""What a producer declares: the groups that it waits for, and what it does when it has learnt of a message's fate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sqlalchemy import Engine

from outbox.calling.callback import Callback
from outbox.consumer.subscription import Subscription
from outbox.database.engines import check_database
from outbox.errors import InvalidHandler
from outbox.message.content import check_group, check_topic
from outbox.message.model import Delivery, DeliveryStatus, Message
from outbox.message.notice import DELIVERED, original_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryCallback(Callback):
    """What the producer does when it has learnt of a message's ``fate``: ``function(delivery, session)``."""

    forms: ClassVar[tuple[tuple[str, ...], ...]] = (("delivery", "session"),)
    internal: ClassVar[str] = DELIVERED
    fate: CallbackKind

    @property
    def decorator(self) -> str:  # type: ignore[override]
        """What of the `Outbox` declares it."""
        return f"on_{self.fate}"

    @property
    def key(self) -> tuple[str, CallbackKind]:
        """What there is one for."""
        return self.topic, self.fate

    def fact(self, notice: Message, facts: Mapping[str, Any]) -> Delivery:
        """Return what has become of the message."""
        message = original_of(notice, facts, self.model, self.codecs)
        return Delivery(message, facts["group"], DeliveryStatus(facts["status"]), facts["reason"])
