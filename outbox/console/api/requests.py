"""What the endpoints take: dataclasses that `outbox.reader` reads from queries and bodies, and a few headers.

The OpenAPI document is made of the same dataclasses, so that a field is declared once.
"""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin
from uuid import UUID

from fastapi import Body, Depends, Header, Query, Request

from outbox.console.permissions import Principal
from outbox.console.problems import KINDS, MEDIA_TYPE
from outbox.errors import InvalidRequest
from outbox.operator.model import MAX_PAGE, PageRequest
from outbox.reader import FieldShape, Reader, Seconds, grouped, option, plain, shape_of, unknown_name

T = TypeVar("T")
#: Which rows of a list, and which page of them.
Listed = tuple[T, PageRequest]

PREFIX = "/api/v1"

_QUERY = Reader("text", error=InvalidRequest)
_BODY = Reader("data", error=InvalidRequest)

# What PostgreSQL can store, and a pair of a name and a value.
_TEXT, _PAIR = r"^[^\x00]*$", r"^[^\x00=]*[^\x00=\s][^\x00=]*=[^\x00]*$"
_SCALARS: Mapping[Any, dict[str, Any]] = {
    str: {"type": "string", "pattern": _TEXT},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    Seconds: {"type": "number", "minimum": 0},
    dt.datetime: {"type": "string", "format": "date-time"},
    UUID: {"type": "string", "format": "uuid"},
    tuple[str, str]: {"type": "string", "pattern": _PAIR},
}


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which page of a list; more than 500 rows at once are not returned."""

    page_size: int = option(50, "The most rows of a page.", least=1, most=100_000)
    page_token: str | None = option(None, "The next_page_token of the page before.", most=20_000)


@dataclass(frozen=True, slots=True)
class ExportQuery:
    """How much to export."""

    limit: int = option(10_000, "The most rows.", least=1, most=100_000)


def from_query(*kinds: type, without: tuple[str, ...] = ()) -> Any:
    """Return a default for a parameter that is the query, read into these dataclasses: one, or a tuple of them.

    ``without`` names fields that the query hasn't. A `PageQuery` becomes a `PageRequest`.

    Raises (when it is read):
        InvalidRequest: a value that isn't one, or a name that isn't known.
    """

    def read(request: Request, **_: object) -> Any:
        return _read(_QUERY, grouped(request.query_params.multi_items()), "query", kinds, without)

    shapes = [shape for kind in kinds for shape in shape_of(kind) if shape.name not in without]
    return _depends(read, {each.name: Query(None, json_schema_extra=schema_of(each)) for each in shapes})


def from_body(*kinds: type) -> Any:
    """Return a default for a parameter that is the JSON body, read into these dataclasses; as `from_query` does."""

    def read(body: Any) -> Any:
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object", "body")
        return _read(_BODY, body, "body", kinds, ())

    shapes = [shape for kind in kinds for shape in shape_of(kind)]
    return _depends(read, {"body": Body(json_schema_extra=object_schema(kinds[0].__doc__ or "", shapes))})


def _depends(read: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    """Return a dependency whose parameters FastAPI puts into the document, and doesn't convert."""
    own = inspect.signature(read).parameters.get("request")
    # The other parameters are documented only; their values are read from the request.
    read.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        *([own.replace(annotation=Request)] if own else []),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Any, default=default)
          for name, default in fields.items()),
    ])  # fmt: skip
    return Depends(read)


def _read(
    reader: Reader, values: Mapping[str, Any], path: str, kinds: tuple[type, ...], without: tuple[str, ...]
) -> Any:
    names = {kind: [name for each in shape_of(kind) for name in (each.name, *each.option.aliases)] for kind in kinds}
    known = [name for each in names.values() for name in each if name not in without]
    if unknown := [name for name in values if name not in known]:
        raise InvalidRequest(unknown_name(unknown[0], known, f"{path}."), f"{path}.{unknown[0]}")
    made: list[Any] = []
    for kind in kinds:
        one: Any = reader.read(kind, {name: value for name, value in values.items() if name in names[kind]}, path)
        made.append(PageRequest(min(one.page_size, MAX_PAGE), one.page_token) if isinstance(one, PageQuery) else one)
    return made[0] if len(made) == 1 else tuple(made)


def schema_of(shape: FieldShape) -> dict[str, Any]:
    """Return the JSON schema of a field."""
    known, schema = shape.option, _item_schema(shape.item)
    kind = schema.get("type")
    bounds = {
        "minLength" if kind == "string" else "minimum": known.least,
        "maxLength" if kind == "string" else "maximum": known.most,
        "exclusiveMinimum": known.above,
        "exclusiveMaximum": known.below,
    }
    schema |= {name: bound for name, bound in bounds.items() if bound is not None and kind}
    if shape.many:
        schema = {"type": "array", "items": schema}
    if shape.optional:
        schema = {"anyOf": [schema, {"type": "null"}]}
    if shape.default is not MISSING and shape.default is not None:
        schema["default"] = plain(shape.default)
    return schema | ({"description": known.help} if known.help else {})


def object_schema(description: str, shapes: list[FieldShape]) -> dict[str, Any]:
    """Return the JSON schema of an object with these fields, and no others."""
    return {
        "type": "object",
        "description": inspect.cleandoc(description),
        "properties": {shape.name: schema_of(shape) for shape in shapes},
        "required": [shape.name for shape in shapes if shape.default is MISSING],
        "additionalProperties": False,
    }


def _item_schema(hint: Any) -> dict[str, Any]:
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"type": "string", "enum": [each.value for each in hint]}
    if isinstance(hint, type) and is_dataclass(hint):
        return object_schema(hint.__doc__ or "", list(shape_of(hint)))
    if get_args(hint) and get_origin(hint) is not Mapping:
        return {"type": "string", "enum": list(get_args(hint))}
    return {"type": "object"}


IfMatch = Annotated[str | None, Header(description="The entity tag that you read; if it has changed: 412.")]
IfNoneMatch = Annotated[str | None, Header(description="The entity tag that you have; if it is still so: 304.")]
IdempotencyKey = Annotated[str | None, Header(description="Makes a repeated order the same bulk job.")]

_TAG = re.compile(r'\s*(?:W/)?"([^"]*)"\s*')
_KEY = re.compile(r"[\x21-\x7e]{1,200}")


def etag(version: str) -> str:
    """Return the entity tag of a version."""
    return f'"{version}"'


def is_known(if_none_match: str | None, version: str) -> bool:
    """Return whether the client has this version already."""
    return (if_none_match or "").strip() == "*" or version in _TAG.findall(if_none_match or "")


def expected_version(if_match: str | None) -> str | None:
    """Return the version that the client has read; None where any will do.

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
    """Return the key of a bulk job, bound to the principal that orders it: no other one gets at that job.

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
