"""A body for people: as JSON or text, else how long it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from outbox import codec
from outbox.errors import InvalidMessage


def readable(half: Mapping[str, Any] | None, raw: bytes | None) -> Any:
    """Return the body of a half message, decoded by its content type; else how long it is, and its digest."""
    if half is None or raw is None:
        return None
    digest = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    try:
        decoded = codec.decode(raw, half["content_type"])
    except InvalidMessage as error:
        return {**digest, "error": str(error)}
    return digest if isinstance(decoded, bytes) else decoded
