"""Notices: messages of internal topics, by which the framework tells an application facts about its messages.

A notice is written in the transaction of the fact that it tells, and consumed by a group like any other: so it is
retried, parked, paused and seen as any message. It is a copy of the message that it is about, body and headers as they
were, so that its handler reads no second database, and masks hide in it what they hide there. Its key is the id of that
message: the facts about one come in order. Its tag is the group that it is for. What it tells is JSON in a header.

An internal topic has no notices about its own messages.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any
from uuid import UUID

from outbox.message.content import INTERNAL_PREFIX, MAX_GROUP, NOTICE_HEADER, OPTION_HEADERS, Codecs
from outbox.message.model import Message, Orphan

#: The internal topic of what a producer has learnt of its messages.
DELIVERED = f"{INTERNAL_PREFIX}delivered"
#: The internal topic of what was parked: messages in a group, and half messages.
PARKED = f"{INTERNAL_PREFIX}parked"


def notice_group(app: str, topic: str) -> str:
    """Return the group of an application, by the group of its `Outbox`, that is told about messages of a topic."""
    exact = f"{app}-{topic}"
    name = re.sub("[./]", "_", exact)
    if name == exact and len(name) <= MAX_GROUP:
        return name
    mark = blake2b(exact.encode(), digest_size=4).hexdigest()
    return f"{name[: MAX_GROUP - len(mark) - 1]}-{mark}"


def facts_of(notice: Message) -> dict[str, Any]:
    """Return what a notice tells: by ``call``, the name of the function that is for it, and what that needs."""
    facts: dict[str, Any] = json.loads(notice.headers[NOTICE_HEADER])
    return facts


def headers_of_original(notice: Message, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of the message that a notice is about."""
    own = {NOTICE_HEADER, *OPTION_HEADERS}
    options: dict[str, str] = facts["options"]
    return {name: value for name, value in notice.headers.items() if name not in own} | options


def original_of(notice: Message, facts: Mapping[str, Any], model: Any, codecs: Codecs) -> Message:
    """Return the message that a notice is about, as it was sent first."""
    return Message(
        UUID(facts["id"]),
        facts["topic"],
        facts["queue"],
        facts["position"],
        facts["key"],
        facts["tag"],
        notice.content_type,
        notice.stored,
        dt.datetime.fromisoformat(facts["born_at"]),
        dt.datetime.fromisoformat(facts["visible_at"]),
        headers=headers_of_original(notice, facts),
        model=model,
        codecs=codecs,
        encoding=notice.encoding,
    )


def parked_half(notice: Message, facts: Mapping[str, Any], model: Any, codecs: Codecs) -> Orphan:
    """Return the half message that a notice is about, as it was when it was parked."""
    born_at = dt.datetime.fromisoformat(facts["born_at"])
    return Orphan(
        UUID(facts["id"]),
        facts["topic"],
        facts["key"],
        facts["tag"],
        headers_of_original(notice, facts),
        notice.content_type,
        notice.stored,
        born_at,
        notice.born_at - born_at,
        facts["attempts"],
        model,
        codecs,
        notice.encoding,
    )
