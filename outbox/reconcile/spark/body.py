"""The model of a topic's bodies as a type of Spark: ``from_json(col("body").cast("string"), body_type(ORDERS))``.

It is made from the JSON Schema that pydantic has of the model, since that is how its bodies are written. What Spark has
no type for (a union of several types, a model within itself, a tuple) is read as its JSON text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import types

from outbox.message.topic import Topic

_PLAIN: Mapping[str, Callable[[], types.DataType]] = {
    "boolean": types.BooleanType,
    "integer": types.LongType,
    "number": types.DoubleType,
    "string": types.StringType,
}
_FORMATS: Mapping[str, Callable[[], types.DataType]] = {"date-time": types.TimestampType, "date": types.DateType}


def body_type(model: Any) -> types.DataType:
    """Return the type of bodies of a `Topic`, or of a model as a `Topic` takes one; each field may be NULL.

    Decimals are texts, as in the bodies: cast them.

    Raises:
        ImportError: pydantic isn't installed.
        pydantic.errors.PydanticUserError: it can't read the model.
    """
    from pydantic import TypeAdapter  # noqa: PLC0415 - an extra

    schema = TypeAdapter(model.model if isinstance(model, Topic) else model).json_schema(mode="serialization")
    return _type_of(schema, schema.get("$defs", {}), ())


def _type_of(schema: Mapping[str, Any], models: Mapping[str, Any], within: tuple[str, ...]) -> types.DataType:
    """Return the type of a JSON Schema; ``within`` are the models in which it lies."""
    if (reference := schema.get("$ref")) is not None:
        name = reference.rpartition("/")[2]
        schema, within = ({} if name in within else models[name]), (*within, name)
    match schema:
        case {"anyOf": [one, {"type": "null"}]}:
            return _type_of(one, models, within)
        case {"type": "object", "properties": fields}:
            typed = {name: _type_of(each, models, within) for name, each in fields.items()}
            return types.StructType([types.StructField(*field) for field in typed.items()])
        case {"type": "object", "additionalProperties": dict(values)}:
            return types.MapType(types.StringType(), _type_of(values, models, within))
        case {"type": "array", "items": dict(items)}:
            return types.ArrayType(_type_of(items, models, within))
        case {"type": str(kind)}:
            return _FORMATS.get(schema.get("format", ""), _PLAIN.get(kind, types.StringType))()
    return types.StringType()
