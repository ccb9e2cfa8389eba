"""Every SQL statement of the framework, as functions that return a `Statement`.

Nothing here opens, commits or rolls back a transaction: flows do. All SQL is schema-qualified and keeps no
session state, so that it works through a transaction pooler; the schema's name is the only text ever put
into it, all values are bound.
"""
