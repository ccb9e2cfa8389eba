"""Arrow tables as Spark carries them: the one place that knows how their types are called there.

Spark has no binary of fixed size, and needs a time zone of the session for its times; so ids travel as binary and
times as microseconds.
"""

from __future__ import annotations

import pyarrow as pa


def wire_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema in which a table of ``schema`` travels."""
    return pa.schema([pa.field(field.name, _wire_type(field.type)) for field in schema])


def ddl(schema: pa.Schema) -> str:
    """Return the schema in which a table of ``schema`` travels, as Spark writes it."""
    return ", ".join(f"`{field.name}` {_name(field.type)}" for field in wire_schema(schema))


def to_wire(table: pa.Table) -> pa.Table:
    """Return the table as it travels."""
    return table.cast(wire_schema(table.schema))


def from_wire(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table of ``schema`` that travelled, from its columns of these names."""
    return table.select(schema.names).cast(schema)


def _wire_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return kind


def _name(kind: pa.DataType) -> str:
    return _NAMES[kind]


_NAMES = {
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.bool_(): "boolean",
    pa.binary(): "binary",
    pa.string(): "string",
}
