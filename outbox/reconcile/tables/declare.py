"""What a job says of a table that isn't ours: where it is, and which of its columns and values mean what to the judge.

Needs no library of the extra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.errors import InvalidSettings
from outbox.reader import option, variable
from outbox.reconcile.measure import wrong_select

if TYPE_CHECKING:
    from outbox.reconcile.job import Job

#: What of a column's name may be told apart from an expression: anything but what ends it.
_NAME = re.compile(r"[^\x00-\x1f]{1,127}")
#: Options of a Spark source whose name says that they are no secret of a file's.
_SECRET = re.compile(r"passw|secret|token|credential|access.?key|account.?key|jaas", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"passw(or)?d=|//[^/@]*:[^/@]*@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ForeignTable:
    """A table or a query that has a row for each message, in place of the outbox's own tables of a side.

    ``table`` or ``query`` is read in the side's PostgreSQL; with ``format`` Spark reads it from any of its sources, of
    the ``path`` (or table of a catalog) and the ``options``. ``columns`` says which of its columns is the judge's
    ``id``, ``at``, ``state``, … (`columns.COLUMNS`); ``states`` what its own values of a state or status are called.
    ``options_env`` names for an option the environment variable that has it, ``options`` may hold no secret.

    Raises:
        InvalidSettings: neither or both of a table of PostgreSQL's and a source of Spark's, a query that is no SELECT,
            no id among the columns; names the mend.
    """

    table: str | None = option(None, "The table, as name or schema.name.")
    query: str | None = option(None, "A SELECT in place of a table.")
    columns: Mapping[str, str] = option(help="The judge's columns, and what the table calls them.", factory=dict)
    states: Mapping[str, str] = option(help="The table's states, and what the judge calls them.", factory=dict)
    format: str | None = option(None, "A source of Spark's: parquet, iceberg, delta, jdbc, kafka, ….")
    path: str | None = option(None, "What the source loads.")
    options: Mapping[str, str] = option(help="Options of the source.", factory=dict)
    options_env: Mapping[str, str] = option(
        help="Options that are secrets, each the name of an environment variable.", factory=dict
    )

    def __post_init__(self) -> None:
        if self.format is None:
            if (self.table is None) == (self.query is None):
                raise InvalidSettings("tables: give either table or query, or the format of a source that Spark reads")
            if self.path is not None or self.options or self.options_env:
                raise InvalidSettings("tables: path and options are those of a source of Spark's; give its format too")
        elif self.table is not None or self.query is not None:
            raise InvalidSettings(
                f"tables: what Spark reads by format = {self.format!r} is named by path and options (dbtable and query "
                "are options of jdbc), not by table or query"
            )
        for why in wrong_select("query", self.query or "SELECT"):
            raise InvalidSettings(f"tables: {why}")
        if "id" not in self.columns:
            raise InvalidSettings('tables.columns: say which column has the id of a message, as in { id = "msg_id" }')
        for name, column in self.columns.items():
            if not _NAME.fullmatch(column):
                raise InvalidSettings(f"tables.columns.{name} = {column[:80]!r} is no name of a column")
        for name, value in self.options.items():
            if _SECRET.search(name) or _SECRET_VALUE.search(value):
                raise InvalidSettings(
                    f"tables.options.{name} has a secret, which a file can't keep; name in options_env.{name} the "
                    "environment variable that has it"
                )
        if twice := sorted(self.options.keys() & self.options_env.keys()):
            raise InvalidSettings(f"tables: {', '.join(twice)} is in options and in options_env; give it once")

    @property
    def by_spark(self) -> bool:
        """Can Spark alone read it?"""
        return self.format is not None

    def __str__(self) -> str:
        if self.format is not None:
            return f"{self.format} {self.path or ''}".rstrip()
        return f"table {self.table}" if self.table is not None else "query"

    def secrets(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the options that the environment has.

        Raises:
            InvalidSettings: a variable isn't set; names it.
        """
        found: dict[str, str] = {}
        for name, called in self.options_env.items():
            if (value := variable(called, environ)) is None:
                raise InvalidSettings(f"tables.options_env.{name}: the environment variable {called} isn't set")
            found[name] = value
        return found


def wrong_tables(job: Job) -> Iterator[str]:
    """Say what of a job can't be done, since the tables of a side aren't ours."""
    yield from _wrong_mappings(job)
    yield from _only_of_ours(job)
    yield from _wrong_ways(job)


def _wrong_mappings(job: Job) -> Iterator[str]:
    # What knows the judge's columns needs libraries that what only describes a job mustn't pay for.
    from outbox.reconcile.tables.columns import NAMES, wrong_columns  # noqa: PLC0415 - see above

    for part, table in job.tables.items():
        if wrong := wrong_columns(part, list(table.columns), table.states):
            yield f"{part}.tables ({table}): {wrong}"
        needed = [name for name in NAMES[part] if len({getattr(pair, name) for pair in job.pairs}) > 1]
        if missing := [name for name in needed if name not in table.columns]:
            yield (
                f"{part}.tables ({table}): nothing tells the rows of several pairs apart; name the {missing[0]} among "
                "the columns, or compare one pair"
            )


def _only_of_ours(job: Job) -> Iterator[str]:
    foreign = " and ".join(job.tables)
    if job.apply:
        yield f"apply: nothing can be repaired in tables that aren't ours (those of the {foreign}); leave it out"
    if job.measures:
        yield f"measure: measures are computed between the outbox's own tables, and those of the {foreign} aren't ours"
    if len(job.tables) == 2 and not job.window.unbounded:
        yield (
            "a window is one of ids that begin with a time, and the ids of two foreign tables needn't; leave since, "
            "until and last out, and bound the tables by queries"
        )
    for pair in job.pairs:
        if "producer" in job.tables and (pair.tags or pair.keys or pair.headers):
            yield f"{pair}: tags, keys and headers filter the outbox's own tables; map the column addressed instead"
        if "consumer" in job.tables and pair.effect is not None:
            yield f"{pair}: an effect is counted beside our inbox; map the column effects instead"


def _wrong_ways(job: Job) -> Iterator[str]:
    if job.by_spark and job.engine == "local":
        yield f"the engine local can't read {' and '.join(map(str, job.by_spark.values()))}; leave it out"
    if job.by_spark and job.tier == "digest":
        yield "the tier digest needs two databases that digest; leave it out"
