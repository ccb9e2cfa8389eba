"""Conditions of requests: entity tags, and keys that make a repeated order the same order."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

from fastapi import Header

from outbox.console.permissions import Principal
from outbox.errors import InvalidRequest

IfMatch = Annotated[str | None, Header(description="The entity tag that you saw; if it has changed: 412.")]
IfNoneMatch = Annotated[str | None, Header(description="The entity tag that you have; if it is still so: 304.")]
IdempotencyKey = Annotated[str | None, Header(description="Makes a repeated order the same order.")]

_TAG = re.compile(r'\s*(?:W/)?"([^"]*)"\s*')
_KEY = re.compile(r"[\x21-\x7e]{1,200}")


def etag(version: str) -> str:
    """Return the entity tag of a version."""
    return f'"{version}"'


def is_known(if_none_match: str | None, version: str) -> bool:
    """Tell whether the caller has this version already."""
    return (if_none_match or "").strip() == "*" or version in _TAG.findall(if_none_match or "")


def expected_version(if_match: str | None) -> str | None:
    """Return the version that the caller has seen; None where any will do.

    Raises:
        InvalidRequest: the header isn't one entity tag.
    """
    if if_match is None or if_match.strip() == "*":
        return None
    match = _TAG.fullmatch(if_match)
    if not match:
        raise InvalidRequest('the header If-Match must be one entity tag, as in "1f4c", or *', "header.if-match")
    return match[1]


def order_key(principal: Principal, idempotency_key: str | None) -> str | None:
    """Return the key of an order, bound to who orders: nobody gets at another one's operation.

    Raises:
        InvalidRequest: the header isn't 1 to 200 printable characters without spaces.
    """
    if idempotency_key is None:
        return None
    if not _KEY.fullmatch(idempotency_key):
        raise InvalidRequest(
            "the header Idempotency-Key must be 1 to 200 printable ASCII characters", "header.idempotency-key"
        )
    return f"{hashlib.sha256(principal.id.encode()).hexdigest()[:16]}:{idempotency_key}"
