"""The SELECT statements of measures: what they may bind, which columns they must return, what these add up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import DateTime, Uuid, bindparam, text
from sqlalchemy.exc import DBAPIError

from outbox.errors import OutboxError, ReconcileError, SourceError
from outbox.reconcile.aside import aside
from outbox.reconcile.bodies import last_of
from outbox.reconcile.measure import Measure
from outbox.reconcile.model import Window
from outbox.reconcile.tally import Tally
from outbox.store import reconcile_measure as store

if TYPE_CHECKING:
    from sqlalchemy import Connection, TextClause

_TYPES: dict[str, Any] = {
    "since": DateTime(timezone=True),
    "until": DateTime(timezone=True),
    "first": Uuid(),
    "last": Uuid(),
}
_EXACT = {"smallint", "integer", "bigint", "numeric"}
_CANCELED = "57014"


@dataclass(frozen=True, slots=True)
class Select:
    """One SELECT of a measure, on the connection of its side; ``seconds`` is how long it may take."""

    connection: Connection
    measure: Measure
    side: str
    window: Window
    seconds: float

    def check(self) -> None:
        """See that it can be run, and returns what it must; it isn't run.

        Raises:
            InvalidSettings: names the measure, what is wrong, and the mend.
            SourceError: the database can't be asked.
        """
        columns = self._run(store.select_columns(self._sql), self.measure.refused, _columns)
        names = [name for name, _ in columns]
        if missing := [column for column in self.measure.columns if column not in names]:
            raise self._refused(f"lacks {', '.join(missing)}; it returns {', '.join(names) or 'nothing'}")
        if extra := [name for name in names if name not in self.measure.columns]:
            raise self._refused(f"returns {', '.join(extra)}, which is neither in by nor in values; leave it out")
        for column in self.measure.columns:
            if names.count(column) > 1:
                raise self._refused(f"returns {column} twice")
        for name, kind in columns:
            if name in self.measure.values and kind not in _EXACT:
                raise self._refused(
                    f"returns {name} as {kind}, which can't be added up exactly; write {name}::numeric, "
                    "or better keep it as numeric in the table"
                )

    def tally(self) -> Tally:
        """Run it, and return its sums.

        Raises:
            ReconcileError: it failed, or took too long.
            SourceError: the database can't be asked.
        """
        measure = self.measure
        rows = self._run(
            store.select_sums(self._sql, measure.by, measure.values),
            lambda why: ReconcileError(f"measure {measure.name!r}: {why}"),
            lambda result: result.all(),
        )
        tally = Tally(len(measure.values))
        for row in rows:
            tally.add(tuple(row[: len(measure.by)]), row[len(measure.by) :])
        tally.faults = [f"{self.side}: {fault}" for fault in tally.faults]
        return tally

    @property
    def _sql(self) -> str:
        return self.measure.selects[self.side]

    def _refused(self, why: str) -> OutboxError:
        return self.measure.refused(f"its {self.side} SELECT {why}")

    def _run(self, sql: str, failed: Callable[[str], OutboxError], rows: Callable[[Any], Any]) -> Any:
        statement = self._bound(sql)
        try:
            with aside(self.connection, self.seconds):
                return rows(self.connection.execute(statement, self._values()))
        except DBAPIError as error:
            told = str(error.orig).strip()
            if getattr(error.orig, "sqlstate", None) == _CANCELED:
                told = f"it took longer than {self.seconds:.0f} s; give it an index, or a shorter window ({told})"
            if error.connection_invalidated:
                raise SourceError(
                    f"measure {self.measure.name!r}: the {self.side}'s database is lost: {told}"
                ) from error
            raise failed(f"its {self.side} SELECT failed: {told}") from error

    def _bound(self, sql: str) -> TextClause:
        statement = text(sql)
        used = statement.compile(dialect=self.connection.dialect).params
        if unknown := sorted(used.keys() - _TYPES.keys()):
            raise self._refused(
                f"has :{', :'.join(unknown)}; only :{', :'.join(_TYPES)} are bound, "
                "and a colon in a text is written \\:"
            )
        return statement.bindparams(*(bindparam(name, type_=_TYPES[name]) for name in used))

    def _values(self) -> dict[str, Any]:
        window = self.window.range
        return {
            "since": self.window.since,
            "until": self.window.until,
            "first": window.first,
            "last": last_of(window),
        }


def _columns(result: Any) -> list[tuple[str, str]]:
    from psycopg import adapters  # noqa: PLC0415 - importing this must not pay for the driver

    kinds = [(column[0], adapters.types.get(column[1])) for column in result.cursor.description]
    return [(name, "another type" if kind is None else kind.regtype) for name, kind in kinds]
