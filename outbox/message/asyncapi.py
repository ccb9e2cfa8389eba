"""An AsyncAPI document of a service: the topics that it declares, and what it does with them.

AsyncAPI 3.0.0 (https://www.asyncapi.com/docs/reference/specification/v3.0.0): a topic is a channel, its message has the
payload's JSON Schema, a group of consumers is a receiving operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from outbox.message.compatibility import json_schema
from outbox.message.topic import VERSION_HEADER, Topic


def document(
    topics: Mapping[str, Topic[Any]],
    sends: Iterable[str],
    receives: Iterable[tuple[str, str]],
    *,
    title: str,
    version: str,
) -> dict[str, Any]:
    """Return the document; ``sends`` names the topics that the service may send, ``receives`` topic and group."""
    schemas: dict[str, Any] = {}
    names = _identifiers(topics)
    channels, messages, operations = {}, {}, {}
    for name, topic in sorted(topics.items()):
        ref = names[name]
        payload = json_schema(topic, "serialization", ref_template=f"#/components/schemas/{ref}.{{model}}")
        schemas |= {f"{ref}.{model}": schema for model, schema in payload.pop("$defs", {}).items()}
        channels[ref] = {"address": name, "messages": {ref: {"$ref": f"#/components/messages/{ref}"}}}
        messages[ref] = {
            "name": name,
            "title": f"{name}, version {topic.version}",
            "contentType": topic.content_type,
            "headers": _headers(topic),
            "payload": {"schemaFormat": "application/schema+json;version=draft-2020-12", "schema": payload},
        }
    for name in sorted(set(sends) & topics.keys()):
        operations[f"send.{names[name]}"] = _operation("send", names[name])
    for name, group in sorted(set(receives)):
        if name in topics:
            operations[f"receive.{names[name]}.{_identifier(group)}"] = _operation("receive", names[name]) | {
                "title": f"group {group}"
            }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": title, "version": version},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": schemas},
    }


def _operation(action: str, ref: str) -> dict[str, Any]:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{ref}"},
        "messages": [{"$ref": f"#/channels/{ref}/messages/{ref}"}],
    }


def _headers(topic: Topic[Any]) -> dict[str, Any]:
    headers = topic.headers()
    return {
        "type": "object",
        "properties": {VERSION_HEADER: {"type": "string", "const": str(topic.version)}},
        **({"required": [VERSION_HEADER]} if headers else {}),
        "additionalProperties": {"type": "string"},
    }


def _identifiers(names: Iterable[str]) -> dict[str, str]:
    """Return a key of the document for each topic: AsyncAPI allows fewer characters than topics have."""
    found: dict[str, str] = {}
    for name in sorted(names):
        base = identifier = _identifier(name)
        number = 1
        while identifier in found.values():
            number += 1
            identifier = f"{base}_{number}"
        found[name] = identifier
    return found


def _identifier(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9._-]", "_", name)
