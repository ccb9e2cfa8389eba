"""Declare the input of endpoints, and write the OpenAPI document of it.

Input is dataclasses that `outbox.reader` reads from queries and bodies, and a few headers. The document is made of the
same dataclasses, so that a field is declared once, with names that a generator can make a client of: FastAPI names an
operation by its path, and gives ``Page[MessageRow]`` and ``Page[AuditRow]`` the same title, which generators take for
one class. It can also be a part of another application's document.
"""

from __future__ import annotations

import copy
import datetime as dt
import enum
import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin
from uuid import UUID

from fastapi import Body, Depends, FastAPI, Header, Query, Request
from fastapi.routing import APIRoute

from outbox.console.context import Context
from outbox.console.problems import KINDS, MEDIA_TYPE
from outbox.errors import InvalidRequest
from outbox.operator.model import MAX_PAGE, PageRequest
from outbox.reader import FieldShape, Reader, Seconds, grouped, option, plain, shape_of, unknown_name

T = TypeVar("T")
#: Which rows of a list, and which page of them.
Listed = tuple[T, PageRequest]

_QUERY = Reader("text", error=InvalidRequest)
_BODY = Reader("data", error=InvalidRequest)
_KEYWORD = inspect.Parameter.KEYWORD_ONLY

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

#: Where the document has its schemas, and those of bodies and of their parts, by their names.
SCHEMAS_AT = "#/components/schemas/"
BODY_SCHEMAS: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which page of a list; more than 500 rows at once are not returned."""

    page_size: int = option(50, "The most rows of a page.", least=1, most=100_000)
    page_token: str | None = option(None, "The next_page_token of the page before.", most=20_000)
    page: int = option(1, "The number of the page instead, within the first 10,000 rows.", least=1, most=10_000)


def from_query(*kinds: type, without: tuple[str, ...] = ()) -> Any:
    """Return a default for a parameter that is the query, read into these dataclasses: one, or a tuple of them.

    ``without`` names fields that the query hasn't. A `PageQuery` becomes a `PageRequest`. What can't be read, or isn't
    known, raises `InvalidRequest` when the request is read.
    """
    shapes = {kind: [each for each in shape_of(kind) if each.name not in without] for kind in kinds}

    def read(request: Request, **_: object) -> Any:
        return _read(_QUERY, grouped(request.query_params.multi_items()), "query", shapes)

    fields = {each.name: Query(None, json_schema_extra=schema_of(each)) for kind in kinds for each in shapes[kind]}
    return Depends(taking(read, {"request": Request}, fields))


def from_body(*kinds: type) -> Any:
    """Return a default for a parameter that is the JSON body, read into these dataclasses; as `from_query` does."""
    shapes = {kind: shape_of(kind) for kind in kinds}

    def read(body: Any) -> Any:
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object", "body")
        return _read(_BODY, body, "body", shapes)

    name = "".join(kind.__name__ for kind in kinds)
    schema = _object_schema(name, kinds[0].__doc__ or "", [each for kind in kinds for each in shapes[kind]])
    return Depends(taking(read, {}, {"body": Body(json_schema_extra=schema)}))


def taking(endpoint: Any, hints: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """Return a function that FastAPI sees with these parameters: by types, and by ``defaults``, which it documents."""
    known = [inspect.Parameter(name, _KEYWORD, annotation=hint) for name, hint in hints.items()]
    read = [inspect.Parameter(name, _KEYWORD, annotation=Any, default=each) for name, each in defaults.items()]
    endpoint.__signature__ = inspect.Signature(known + read)
    return endpoint


def _read(reader: Reader, values: Mapping[str, Any], path: str, shapes: Mapping[type, Sequence[FieldShape]]) -> Any:
    names = {kind: [name for each in shapes[kind] for name in (each.name, *each.option.aliases)] for kind in shapes}
    known = list(itertools.chain(*names.values()))
    if unknown := [name for name in values if name not in known]:
        raise InvalidRequest(unknown_name(unknown[0], known, f"{path}."), f"{path}.{unknown[0]}")
    made: list[Any] = []
    for kind in shapes:
        one: Any = reader.read(kind, {name: value for name, value in values.items() if name in names[kind]}, path)
        made.append(
            PageRequest(min(one.page_size, MAX_PAGE), one.page_token, one.page) if isinstance(one, PageQuery) else one
        )
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


def _object_schema(name: str, description: str, shapes: Sequence[FieldShape]) -> dict[str, Any]:
    """Keep the JSON schema of an object with these fields, and no others; return the reference to it."""
    schema = {
        "type": "object",
        "description": inspect.cleandoc(description),
        "properties": {shape.name: schema_of(shape) for shape in shapes},
        "required": [shape.name for shape in shapes if shape.default is MISSING],
        "additionalProperties": False,
    }
    if BODY_SCHEMAS.setdefault(name, schema) != schema:
        raise TypeError(f"two different bodies are named {name}: a client has one class of a name")
    return {"$ref": SCHEMAS_AT + name}


def _item_schema(hint: Any) -> dict[str, Any]:
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"type": "string", "enum": [each.value for each in hint]}
    if isinstance(hint, UnionType):
        return {"type": "string", "enum": [each.value for part in get_args(hint) for each in part]}
    if isinstance(hint, type) and is_dataclass(hint):
        return _object_schema(hint.__name__, hint.__doc__ or "", shape_of(hint))
    if get_args(hint) and get_origin(hint) is not Mapping:
        return {"type": "string", "enum": list(get_args(hint))}
    return {"type": "object"}


IfNoneMatch = Annotated[str | None, Header(description="The entity tag that you have; if it is still so: 304.")]

_TAG = re.compile(r'\s*(?:W/)?"([^"]*)"\s*')
_KEY = re.compile(r"[\x21-\x7e]{1,200}")


def etag(version: str) -> str:
    """Return the entity tag of a version."""
    return f'"{version}"'


def is_known(if_none_match: str | None, version: str) -> bool:
    """Return whether the client has this version already."""
    return (if_none_match or "").strip() == "*" or version in _TAG.findall(if_none_match or "")


def _expected_version(
    if_match: Annotated[str | None, Header(description="The entity tag that you read; if it has changed: 412.")] = None,
) -> str | None:
    if if_match is None or if_match.strip() == "*":
        return None
    match = _TAG.fullmatch(if_match)
    if not match:
        raise InvalidRequest('the header If-Match must be one entity tag, as in "1f4c", or *', "header.if-match")
    return match[1]


def _order_key(
    context: Context,
    idempotency_key: Annotated[str | None, Header(description="Makes a repeated order the same bulk job.")] = None,
) -> str | None:
    if idempotency_key is None:
        return None
    if not _KEY.fullmatch(idempotency_key):
        raise InvalidRequest(
            "the header Idempotency-Key must be 1 to 200 printable ASCII characters", "header.idempotency-key"
        )
    return f"{hashlib.sha256(context.principal.id.encode()).hexdigest()[:16]}:{idempotency_key}"


#: The version that the client has read; None where any will do.
IfMatch = Annotated[str | None, Depends(_expected_version)]
#: The key of a bulk job, bound to the principal that orders it: no other one gets at that job.
IdempotencyKey = Annotated[str | None, Depends(_order_key)]

_TEXT_SCHEMA = {"type": "string"}
_FIELD = {"field": _TEXT_SCHEMA, "detail": _TEXT_SCHEMA}
#: The schema of every error, and where the document has it.
PROBLEM_SCHEMA = {
    "type": "object",
    "title": "Problem",
    "description": "What failed, and the mend (RFC 9457).",
    "required": ["type", "title", "status", "detail", "instance", "request_id"],
    "properties": {
        **dict.fromkeys(("title", "detail", "instance", "request_id"), _TEXT_SCHEMA),
        "type": {"type": "string", "enum": [f"urn:outbox:problem:{slug}" for slug in KINDS]},
        "status": {"type": "integer"},
        "errors": {"type": "array", "items": {"type": "object", "required": [*_FIELD], "properties": _FIELD}},
    },
}


_PROBLEM = {"$ref": f"{SCHEMAS_AT}Problem"}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what the document says of these statuses, and of those that every endpoint can answer with."""
    titles: dict[int, list[str]] = {}
    for status, title in KINDS.values():
        titles.setdefault(status, []).append(title)
    return {
        status: {"description": "; ".join(titles[status]), "content": {MEDIA_TYPE: {"schema": _PROBLEM}}}
        for status in sorted({400, 401, 403, 413, 422, 429, 500, 503, *statuses})
    }


# --- the OpenAPI document ------------------------------------------------------------------------------

Document = dict[str, Any]

_GENERIC = re.compile(r"([A-Za-z]+)_([A-Za-z]+)_")
#: What the schemas of the console begin with in the document of another application.
_PREFIX = "Outbox"


def short_name(route: APIRoute) -> str:
    """Return the name of an operation, which clients have as the name of a function."""
    return route.name


def complete(document: Document, schemes: Mapping[str, Mapping[str, str]]) -> None:
    """Add the schemas of bodies and of problems to what FastAPI wrote, and how to log in.

    ``schemes`` are those of the console's authorizer; those of dependencies of the application's are there already.
    """
    schemas: Document = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= copy.deepcopy(BODY_SCHEMAS | {"Problem": PROBLEM_SCHEMA})
    _rename_schemas(document, lambda name: _GENERIC.sub(r"\2\1", name))
    if schemes:
        document["components"].setdefault("securitySchemes", {}).update(schemes)
        document["security"] = [{name: []} for name in schemes]


def _rename_schemas(document: Document, renamed: Callable[[str], str]) -> None:
    for each in _objects(document):
        reference = each.get("$ref", "")
        if reference.startswith(SCHEMAS_AT):
            each["$ref"] = SCHEMAS_AT + renamed(reference.removeprefix(SCHEMAS_AT))
    schemas = document["components"]["schemas"]
    document["components"]["schemas"] = {
        renamed(name): schema | {"title": renamed(name)} for name, schema in schemas.items()
    }


def _objects(part: Any) -> Iterator[Document]:
    """Return every object of a document, however deep."""
    if isinstance(part, dict):
        yield part
    for below in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _objects(below)


# --- as a part of another document -------------------------------------------------------------------------


def describe_in(host: FastAPI, console: FastAPI, mark: str) -> None:
    """Have the document of ``host`` describe a console, in the place of the operation whose id is ``mark``.

    So FastAPI says under which prefix the console was included, however deep, and whether it is to be described.
    """
    own = host.openapi

    def openapi() -> Document:
        document = own()
        paths = document.get("paths", {})
        for path in [path for path, methods in paths.items() if methods.get("get", {}).get("operationId") == mark]:
            del paths[path]
            _add(document, copy.deepcopy(console.openapi()), path.rpartition("/")[0])
        return document

    host.openapi = openapi  # type: ignore[method-assign]  # how FastAPI has an application extend its document


def _add(document: Document, part: Document, prefix: str) -> None:
    """Add the document of a console; its names get what two consoles, and the application's own names, differ by."""
    name = re.sub(r"\W+", "_", prefix).strip("_") or "outbox"
    _rename_schemas(part, lambda schema: _PREFIX + schema)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(part["components"]["schemas"])
    schemes = {f"{name}_{scheme}": how for scheme, how in part["components"].get("securitySchemes", {}).items()}
    if schemes:
        components.setdefault("securitySchemes", {}).update(schemes)
    above = [
        {"name": each, "in": "path", "required": True, "schema": {"type": "string"}}
        for each in re.findall(r"{(\w+)}", prefix)
    ]
    for path, methods in part["paths"].items():
        for operation in methods.values():
            operation["operationId"] = f"{name}_{operation['operationId']}"
            operation["tags"] = [f"{name} {tag}" for tag in operation["tags"]]
            operation["parameters"] = above + operation.get("parameters", [])
            operation["security"] = [
                {f"{name}_{scheme}": scopes for scheme, scopes in ways.items()}
                for ways in operation.get("security", part.get("security", []))
            ]
        document["paths"][prefix + path] = methods
