"""What the endpoints answer: the views of `outbox.operator.model`, a few of their own, and problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outbox.console.problems import KINDS, MEDIA_TYPE
from outbox.operator import model


@dataclass(frozen=True, slots=True)
class Acted:
    """What came of an act, in a sentence, and the message as it is now."""

    outcome: str
    message: model.MessageView


@dataclass(frozen=True, slots=True)
class Database:
    """A database of this console; ``parts`` is empty where it couldn't be reached yet."""

    name: str
    parts: list[str]
    reached: bool


@dataclass(frozen=True, slots=True)
class Meta:
    """What this console is, and what the caller may do in it."""

    version: str
    environment: str | None
    read_only: bool
    principal: str
    name: str
    role: str
    permissions: list[str]
    databases: list[Database]


_PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "instance", "request_id"],
    "properties": {
        "type": {"type": "string", "enum": [f"urn:outbox:problem:{slug}" for slug in KINDS]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string"},
        "request_id": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["field", "detail"],
                "properties": {"field": {"type": "string"}, "detail": {"type": "string"}},
            },
        },
    },
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what the document says of these statuses, and of those that every endpoint can answer with."""
    titles: dict[int, list[str]] = {}
    for status, title in KINDS.values():
        titles.setdefault(status, []).append(title)
    return {
        status: {"description": "; ".join(titles[status]), "content": {MEDIA_TYPE: {"schema": _PROBLEM}}}
        for status in sorted({400, 401, 403, 413, 422, 429, 500, 503, *statuses})
    }
