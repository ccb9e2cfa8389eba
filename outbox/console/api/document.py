"""The OpenAPI document: FastAPI's, with names that a generator can make a client of; also as a part of another's.

FastAPI names an operation by its path, and gives ``Page[MessageRow]`` and ``Page[AuditRow]`` the same title, which
generators take for one class. Bodies are read by `outbox.console.api.requests`, so FastAPI doesn't know their schemas.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from outbox.console.api.requests import BODY_SCHEMAS, PROBLEM_SCHEMA, SCHEMAS_AT

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
