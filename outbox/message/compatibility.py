"""Are the bodies that two releases of a service write and read compatible? Judged by JSON Schemas, kept in a file.

A log holds messages of all releases, and a rollout runs two at once. So within a version of a topic each release must
read what every other has written (Confluent calls it FULL_TRANSITIVE): optional fields may come and go. What is more
than that needs a new version and an upcaster. A schema that can't be judged counts as incompatible.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outbox.errors import InvalidSettings
from outbox.message.topic import Topic

JsonSchema = Mapping[str, Any]
#: topic → version → the forms that releases have given it, the newest last.
Published = dict[str, dict[str, list["Form"]]]


def json_schema(topic: Topic[Any], mode: Literal["validation", "serialization"], **options: str) -> dict[str, Any]:
    """Return pydantic's JSON Schema of a topic's bodies, which also says what texts of Decimals and keys must be."""
    from pydantic.json_schema import GenerateJsonSchema  # noqa: PLC0415 - optional dependency

    class WithFormats(GenerateJsonSchema):
        def decimal_schema(self, schema: Any) -> dict[str, Any]:
            written = super().decimal_schema(schema)
            bounds = {keyword: float(schema[name]) for name, keyword in _DECIMAL_BOUNDS.items() if name in schema}
            for alternative in written.get("anyOf", [written]):
                if alternative["type"] == "string":
                    alternative |= {"format": "decimal", **bounds}
            return written

        def dict_schema(self, schema: Any) -> dict[str, Any]:
            written = super().dict_schema(schema)
            key = self.generate_inner(schema["keys_schema"]) if "keys_schema" in schema else {}
            if key.get("type") in {"boolean", "integer", "number"}:
                written["propertyNames"] = {"format": key["type"]}
            elif key.get("type") == "string" or "$ref" in key:
                # As newer versions of pydantic say by themselves; the pattern is a keyword of its own.
                names = {keyword: key[keyword] for keyword in key.keys() - {"type", "title", "pattern"}}
                written |= {"propertyNames": names} if names else {}
            return written

    return topic.type_adapter.json_schema(mode=mode, schema_generator=WithFormats, **options)  # type: ignore[no-any-return]  # the adapter has no type


_DECIMAL_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


@dataclass(frozen=True, slots=True)
class Form:
    """What a release reads and writes of a version of a topic, each as a JSON Schema.

    They differ: a field with a default may be left out of a body that is read, and is always written.
    """

    reads: JsonSchema
    writes: JsonSchema

    @classmethod
    def of(cls, topic: Topic[Any]) -> Form:
        """Return the form that this code gives a topic."""
        return cls(json_schema(topic, "validation"), json_schema(topic, "serialization"))


@dataclass(frozen=True, slots=True)
class TopicProblem:
    """Something that keeps a release from living beside those before it."""

    topic: str
    problem: str


def problems(declared: Mapping[str, Topic[Any]], published: Published) -> Iterator[TopicProblem]:
    """Yield what keeps the topics of this code from reading, and from being read by, the releases that published."""
    for name, versions in published.items():
        topic = declared.get(name)
        if topic is None:
            yield TopicProblem(name, "isn't declared any more, and messages of it may wait for years")
            continue
        numbers = sorted(map(int, versions))
        if newest := [number for number in numbers if number > topic.version]:
            yield TopicProblem(name, f"is at version {topic.version}, but version {newest[-1]} was published")
        if missing := topic.missing_upcasters(numbers[0]):
            yield TopicProblem(
                name,
                f"has no upcaster from version {missing[0]} to {missing[0] + 1}: write @topic.upcast({missing[0]})",
            )
        form = Form.of(topic)
        for earlier in versions.get(str(topic.version), []):
            found = [f"can't read bodies of releases before: {why}" for why in unreadable(form.reads, earlier.writes)]
            found += [f"can't be read by releases before: {why}" for why in unreadable(earlier.reads, form.writes)]
            if found:
                yield TopicProblem(
                    name, f"{found[0]}; make it optional, or declare version {topic.version + 1} with an upcaster"
                )
                break


def unpublished(declared: Mapping[str, Topic[Any]], published: Published) -> list[str]:
    """Return the topics whose form of now isn't among the published ones."""
    return [
        name
        for name, topic in declared.items()
        if Form.of(topic) not in published.get(name, {}).get(str(topic.version), [])
    ]


def publish(declared: Mapping[str, Topic[Any]], published: Published) -> Published:
    """Return the published forms once those of now are added."""
    result = {name: {number: list(forms) for number, forms in versions.items()} for name, versions in published.items()}
    for name in unpublished(declared, published):
        topic = declared[name]
        result.setdefault(name, {}).setdefault(str(topic.version), []).append(Form.of(topic))
    return result


def from_json(document: Any) -> Published:
    """Return what `as_json` made a document of.

    Raises:
        InvalidSettings: it isn't such a document.
    """
    try:
        return {
            name: {
                str(int(number)): [Form(each["reads"], each["writes"]) for each in forms]
                for number, forms in versions.items()
            }
            for name, versions in document.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidSettings(
            f"no file of published topics, which maps topic, version and forms: {type(error).__name__}: {error}"
        ) from None


def as_json(published: Published) -> dict[str, Any]:
    """Return a document of the published forms, in a stable order."""
    return {
        name: {
            number: [{"reads": form.reads, "writes": form.writes} for form in forms]
            for number, forms in sorted(versions.items(), key=lambda item: int(item[0]))
        }
        for name, versions in sorted(published.items())
    }


# --- what a schema allows ---------------------------------------------------------------------------------------------

#: What describes, and forbids nothing. A discriminator says which alternative is meant, which each says by a constant.
_ANNOTATIONS = frozenset(
    {"$defs", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
)
#: Keywords that are judged by rules of their own; any other must be the same on both sides.
_JUDGED = frozenset(
    {
        *("$ref", "anyOf", "oneOf", "allOf", "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems", "items", "prefixItems"),
        *("properties", "required", "additionalProperties", "propertyNames"),
    }
)
#: The schema that no value has.
_NOTHING: JsonSchema = {"not": {}}
_LOWER, _UPPER = ("minLength", "minItems"), ("maxLength", "maxItems")


def unreadable(reader: JsonSchema, writer: JsonSchema) -> Iterator[str]:
    """Yield why a body that ``writer`` allows may not be one that ``reader`` allows.

    A writer whose schema doesn't mention other properties writes none (pydantic's ``extra="ignore"``).
    """
    yield from _Comparison(reader, writer).compare(reader, writer, "")


class _Comparison:
    """Of two documents; remembers the pairs under way, for a model may contain itself."""

    def __init__(self, reader: JsonSchema, writer: JsonSchema) -> None:
        self._reader, self._writer = reader, writer
        self._begun: set[str] = set()

    def compare(self, reader: Any, writer: Any, path: str) -> Iterator[str]:
        reads, writes = _resolved(reader, self._reader), _resolved(writer, self._writer)
        pair = _text([reads, writes])
        if not reads.keys() - _ANNOTATIONS or writes == _NOTHING or pair in self._begun:
            return
        self._begun.add(pair)
        yield from self._compare_alternatives(reads, writes, path)
        # Only while it is under way: what failed must fail again, where another alternative meets it.
        self._begun.remove(pair)

    def _compare_alternatives(self, reads: JsonSchema, writes: JsonSchema, path: str) -> Iterator[str]:
        alternatives = _alternatives(writes)
        readable_as = _alternatives(reads)
        if len(alternatives) == len(readable_as) == 1:
            yield from self._compare_one(
                _resolved(readable_as[0], self._reader), _resolved(alternatives[0], self._writer), path
            )
            return
        for written in alternatives:
            reasons = [list(self.compare(option, written, path)) for option in readable_as]
            if all(reasons):
                # The reason of the alternative that comes nearest.
                yield min(reasons, key=len)[0] if len(reasons) == 1 else f"{_at(path)} may be {_kind(written)}"

    def _compare_one(self, reads: JsonSchema, writes: JsonSchema, path: str) -> Iterator[str]:
        yield from self._compare_values(reads, writes, path)
        for keyword in sorted(reads.keys() - _JUDGED - _ANNOTATIONS):
            # A reference is a name, and what it names may differ in the two documents.
            if reads[keyword] != writes.get(keyword) or "$ref" in _text(reads[keyword]):
                yield f"{_at(path)} must have {keyword} {_text(reads[keyword])}"
        yield from _compare_bounds(reads, writes, path)
        yield from self._compare_items(reads, writes, path)
        yield from self._compare_properties(reads, writes, path)

    def _compare_values(self, reads: JsonSchema, writes: JsonSchema, path: str) -> Iterator[str]:
        written, allowed = _values(writes), _values(reads)
        if allowed is not None and (written is None or not written <= allowed):
            more = "anything" if written is None else ", ".join(sorted(written - allowed))
            yield f"{_at(path)} may be {more}, and only {', '.join(sorted(allowed))} is expected"
        expected, found = reads.get("type"), writes.get("type")
        if expected is None and found is None and written is None:
            yield f"{_at(path)} has no type, so that its rules can't be compared"
        if expected is None or expected == found or (expected, found) == ("number", "integer"):
            return
        if found is None and written is not None and all(_is_of(value, expected) for value in written):
            return
        yield f"{_at(path)} is {found or 'of any type'}, and {expected} is expected"

    def _compare_items(self, reads: JsonSchema, writes: JsonSchema, path: str) -> Iterator[str]:
        if writes.get("type") != "array":
            return
        fixed = max(len(reads.get("prefixItems", ())), len(writes.get("prefixItems", ())))
        most = writes.get("maxItems")
        for index in range(fixed + 1):
            if most is not None and index >= most:
                return
            expected, found = _item(reads, index), _item(writes, index)
            where = f"{path}.{index}" if index < fixed else f"{path}.*"
            if found is not False:
                yield from self.compare(expected, found, where.removeprefix("."))

    def _compare_properties(self, reads: JsonSchema, writes: JsonSchema, path: str) -> Iterator[str]:
        if writes.get("type") != "object":
            return
        expected, found = reads.get("properties", {}), writes.get("properties", {})
        others = reads.get("additionalProperties", True)
        if "propertyNames" in reads:
            allowed, possible = ({"type": "string", **side.get("propertyNames", {})} for side in (reads, writes))
            yield from self.compare(allowed, possible, _field(path, "(name)"))
        for name in reads.get("required", ()):
            if name not in writes.get("required", ()):
                yield f"{_at(_field(path, name))} is required, and isn't always written"
        for name, written in found.items():
            if name not in expected and others is False:
                yield f"{_at(_field(path, name))} isn't known to a reader that forbids other fields"
            else:
                yield from self.compare(expected.get(name, others), written, _field(path, name))
        rest = {name: schema for name, schema in expected.items() if name not in found}
        for written in (writes.get("additionalProperties", False), *writes.get("patternProperties", {}).values()):
            for name, schema in {**rest, "*": others}.items() if written is not False else ():
                yield from self.compare(schema, written, _field(path, name))


def _resolved(schema: Any, document: JsonSchema) -> JsonSchema:
    """Return a schema as a mapping without a reference at its top."""
    if schema is True:
        return {}
    if schema is False:
        return _NOTHING
    for _ in range(100):
        parts = schema.get("allOf", ())
        if "$ref" in schema:
            target = document["$defs"][schema["$ref"].removeprefix("#/$defs/")]
            schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
        elif len(parts) == 1:
            schema = {**parts[0], **{key: value for key, value in schema.items() if key != "allOf"}}
        else:
            break
    return schema  # type: ignore[no-any-return]  # JSON has no types


def _alternatives(schema: JsonSchema) -> list[JsonSchema]:
    """Return the schemas one of which holds; what stands beside them holds for each."""
    beside = {key: value for key, value in schema.items() if key not in {"anyOf", "oneOf"} | _ANNOTATIONS}
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not ({"anyOf", "oneOf"} <= schema.keys()):
            return [{**option, **beside} if isinstance(option, Mapping) else {} for option in schema[keyword]]
    if isinstance(kinds := schema.get("type"), list):
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def _values(schema: JsonSchema) -> set[str] | None:
    """Return the values that a schema names, each as JSON; None where it names none."""
    if "const" in schema:
        return {_text(schema["const"])}
    return {_text(value) for value in schema["enum"]} if "enum" in schema else None


_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def _is_of(value: str, kind: str) -> bool:
    found = json.loads(value)
    return isinstance(found, _KINDS.get(kind, ())) and (kind == "boolean" or not isinstance(found, bool))


def _compare_bounds(reads: JsonSchema, writes: JsonSchema, path: str) -> Iterator[str]:
    for keyword in _LOWER:
        if reads.get(keyword, 0) > writes.get(keyword, 0):
            yield f"{_at(path)} must have {keyword} {reads[keyword]}"
    for keyword in _UPPER:
        if keyword in reads and not writes.get(keyword, float("inf")) <= reads[keyword]:
            yield f"{_at(path)} must have {keyword} {reads[keyword]}"
    for inclusive, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        tightest = max(_edges(writes, inclusive, exclusive, sign), default=None)
        for edge in _edges(reads, inclusive, exclusive, sign):
            if tightest is None or tightest < edge:
                yield f"{_at(path)} must have {exclusive if edge[1] else inclusive} {sign * edge[0]}"


def _edges(schema: JsonSchema, inclusive: str, exclusive: str, sign: int) -> Iterator[tuple[float, bool]]:
    """Yield the bounds of one side, the tighter the greater: 5 excluded is tighter than 5 included."""
    for keyword in (inclusive, exclusive):
        if keyword in schema:
            yield sign * schema[keyword], keyword == exclusive


def _item(schema: JsonSchema, index: int) -> Any:
    fixed = schema.get("prefixItems", ())
    return fixed[index] if index < len(fixed) else schema.get("items", True)


def _kind(schema: JsonSchema) -> str:
    return str(schema.get("type") or schema.get("$ref", "something else").rpartition("/")[2])


def _field(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")


def _at(path: str) -> str:
    return f"field {path}" if path else "the body"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
