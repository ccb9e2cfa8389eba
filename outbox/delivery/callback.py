"""The groups that call the callbacks of an application: consumers of internal topics.

All callbacks of one internal topic that are about the same topic are one group, and so are called in the order of the
facts about a message. It is an ordinary group, ordered by key: what a callback raises undoes its transaction, and it is
retried; when its attempts are used up, the notice is parked, and later ones about that message wait for an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outbox.calling.callback import Callback
from outbox.calling.function import CalledFunctions
from outbox.consumer.subscription import Subscription
from outbox.message.model import Message, ReplySender, Skip
from outbox.message.notice import facts_of

if TYPE_CHECKING:
    from outbox.settings import Settings


def declare_callback(
    functions: CalledFunctions, callback: Callback, settings: Settings, send_reply: ReplySender
) -> None:
    """Keep a callback, and have the group of its topic consume what it is told.

    Raises:
        InvalidHandler: there is one of its kind and topic already.
    """
    functions.add(callback)
    about = callback.internal, callback.topic
    of_group = [each for each in functions if isinstance(each, Callback) and (each.internal, each.topic) == about]
    subscription = Subscription.declare(
        settings,
        callback.internal,
        _handler(of_group),
        None,
        callback.codecs,
        group=callback.group,
        tags=(callback.group,),
        ordered="key",
        about=callback.topic,
        send_reply=send_reply,
    )
    functions.of(Subscription)[subscription.key] = subscription


def _handler(callbacks: Sequence[Callback]) -> Callable[..., Any]:
    """Return the handler of their group: an async one, if one of them is."""
    by_call = {each.decorator: each for each in callbacks}

    def handle(notice: Message, session: Any) -> Any:
        facts = facts_of(notice)
        if (callback := by_call.get(facts["call"])) is None:
            return _undeclared(facts)
        return callback.function(callback.fact(notice, facts), session)

    async def handle_async(notice: Message, session: Any) -> Any:
        facts = facts_of(notice)
        if (callback := by_call.get(facts["call"])) is None:
            return _undeclared(facts)
        fact = callback.fact(notice, facts)
        if callback.is_async:
            return await callback.function(fact, session)
        return await session.run_sync(lambda sync: callback.function(fact, sync))

    handler: Callable[..., Any] = handle_async if any(each.is_async for each in callbacks) else handle
    # As workers report it.
    handler.__module__, handler.__qualname__ = "", ", ".join(each.name for each in callbacks)
    return handler


def _undeclared(facts: Mapping[str, Any]) -> Skip:
    return Skip(f"no {facts['call']} of topic {facts['topic']!r} is declared any more")
