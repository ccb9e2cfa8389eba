"""Compute measures: what the two sides' business tables, and the messages under way between them, add up to.

Sums are exact, to the last digit. Bodies are added up by the database, and one by one where it can't read one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import DateTime, Uuid, bindparam, text
from sqlalchemy.exc import DBAPIError

from outbox.consumer.sql import MATCHES
from outbox.database.execute import (
    SERIALIZATION_FAILURE,
    STATEMENT_CANCELLED,
    Row,
    Statement,
    execute,
    kind_of,
    sqlstate,
    statement,
)
from outbox.errors import ErrorKind, InvalidMessage, OutboxError, ReconcileError, SourceLost
from outbox.message import content
from outbox.message.compression import decompress
from outbox.message.content import ENCODING_HEADER
from outbox.message.masking import NAMES, names_in, path_of
from outbox.reconcile.job import FIRST_ID, Pair, Range, Window
from outbox.reconcile.measure import COUNT, Measure, Sums
from outbox.reconcile.measure.result import EXACT, MeasureResult, MeasureRow
from outbox.reconcile.rows import to_uuids
from outbox.reconcile.source import in_savepoint
from outbox.reconcile.sql import values_of
from outbox.reconcile.tables import InboxState, ProducerState
from outbox.text import MASK, storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: The parts of a key, in the order of the measure's ``by``; None is NULL.
Key = tuple[str | None, ...]
Path = Sequence[str]

#: Half messages that one statement adds up.
BATCH = 50_000
#: Bodies that are read at once where the database couldn't read one of a batch.
CHUNK = 100
#: How large (bytes) a body may be that was stored compressed: about what the database reads of one that wasn't.
LARGEST_BODY = 256 * 1024 * 1024
_EXAMPLES = 3


@dataclass(slots=True)
class Tally:
    """Sums by key, one for each value of a measure. ``faults`` are sentences about what couldn't be added.

    ``by`` names the parts of the keys, ``width`` is the number of values.
    """

    by: Sequence[str]
    width: int
    faults: list[str] = field(default_factory=list)
    sums: dict[Key, list[Decimal]] = field(default_factory=dict)

    def add(self, key: Key, values: Sequence[Decimal]) -> None:
        """Add numbers to those of a key; infinity and NaN, which numeric can hold, add up to nothing and are a fault.

        ``values`` are as many as there are values in the measure.
        """
        sums = self.sums.setdefault(key, [Decimal()] * self.width)
        for at, value in enumerate(values):
            if value.is_finite():
                sums[at] = EXACT.add(sums[at], value)
            else:
                ((_, label),) = shown(self.by, [key])
                self.faults.append(f"{value} under the key {label!r} can't be added up; mend the row that has it")

    def with_numbers(self, at: Collection[int]) -> Tally:
        """Return it with those parts of its keys (by place) as numbers that are some: 7.00, 7 and 07 are one key."""
        tally = Tally(self.by, self.width, self.faults)
        for key, values in self.sums.items():
            tally.add(tuple(_number_text(part) if number in at else part for number, part in enumerate(key)), values)
        return tally


class Bodies:
    """Adds up bodies in the producer's database as a measure of a pair says, once.

    ``seconds`` is how long a statement may take.
    """

    def __init__(self, connection: Connection, schema: str, measure: Sums, pair: Pair, seconds: float) -> None:
        self._connection, self._schema, self._seconds = connection, schema, seconds
        self._of_pair = values_of(pair)
        paths = measure.in_flight
        self._described = bool(paths)
        self._by = [names_in(paths[column]) for column in measure.by if paths]
        self._values = [
            None if paths[column] == COUNT else names_in(paths[column]) for column in measure.values if paths
        ]
        self._tally = Tally(measure.by, len(measure.values))
        self._found = self._unreadable = 0
        self._examples: list[str] = []

    def in_transit(self, ids: Sequence[UUID]) -> Tally:
        """Return what the bodies of these messages carry."""
        if ids and not self._described:
            self._tally.faults.append(
                f"{len(ids)} messages are under way, and what they carry isn't known: give the measure in_flight, "
                "or a window in which all has arrived"
            )
            return self._tally
        there = 0
        for start in range(0, len(ids), BATCH):
            batch = ids[start : start + BATCH]
            there += self._rows(statement(self._schema, COUNT_HALVES, {"ids": batch}))[0][0]
            self._add(statement(self._schema, HALVES_OF, {**self._of_pair, "ids": batch}))
        if there < len(ids):
            self._tally.faults.append(
                f"the bodies of {len(ids) - there} of {len(ids)} messages under way are no longer in the producer's "
                "database (pruned?): what they carry isn't counted"
            )
        return self._completed(f"{len(ids)} messages under way")

    def settled(self, window: Range, starts: Mapping[int, int]) -> Tally:
        """Return what the bodies of all committed messages of a window carry that are meant for the group.

        ``starts`` are the positions, by queue, after which the group began.
        """
        values = {**self._of_pair, "queues": list(starts), "positions": list(starts.values())}
        ids = {"first": window.first, "last": window.last}
        while following := self._rows(statement(self._schema, BATCH_END, {**ids, "batch": BATCH})):
            ((end,),) = following
            batch = {"first": ids["first"], "last": UUID(int=end.int - 1)}
            self._add(statement(self._schema, SETTLED_HALVES, {**values, **batch}))
            ids["first"] = end
        self._add(statement(self._schema, SETTLED_HALVES, {**values, **ids}))
        return self._completed(f"{self._found} messages")

    def _completed(self, among: str) -> Tally:
        """Return the tally, with what couldn't be read."""
        if self._unreadable:
            more = self._unreadable - len(self._examples)
            self._tally.faults.append(
                f"{self._unreadable} of {among} have a body that can't be read, so that what they carry isn't counted: "
                f"{'; '.join(self._examples)}{f'; and {more} more' if more else ''}"
            )
        return self._tally

    def _add(self, halves: Statement) -> None:
        """Add the bodies of a batch; one by one if the database can't read all of them."""
        try:
            rows = self._rows(body_sums(halves, self._by, self._values))
        except DBAPIError as error:
            # Data exception, and program limit exceeded: a nesting or a number that is too much for it.
            if sqlstate(error)[:2] not in {"22", "54"}:
                raise
            rows = [(False,)]
        if not all(row[0] for row in rows):
            self._add_one_by_one(halves)
            return
        for _, number, *columns in rows:
            self._found += number
            self._tally.add(tuple(columns[: len(self._by)]), columns[len(self._by) :])

    def _add_one_by_one(self, halves: Statement) -> None:
        after = FIRST_ID
        while rows := self._rows(next_bodies(halves, after, CHUNK)):
            for id_, content_type, stored, encoding in rows:
                try:
                    raw = decompress(stored, encoding, LARGEST_BODY)
                    self._tally.add(*carried(raw, content_type, self._by, self._values))
                except InvalidMessage as error:
                    self._unreadable += 1
                    if len(self._examples) < _EXAMPLES:
                        self._examples.append(f"{id_}: {error}")
            self._found += len(rows)
            after = rows[-1][0]

    def _rows(self, select: Statement) -> list[Row]:
        with in_savepoint(self._connection, self._seconds, by_index=True):
            return execute(self._connection, select)[0]


def carried(
    raw: bytes, content_type: str, by: Sequence[Path], values: Sequence[Path | None]
) -> tuple[Key, list[Decimal]]:
    """Return key and numbers of one body, exactly as the database reads them; no path counts.

    Raises:
        InvalidMessage: it isn't JSON, lacks what a path names, or has something else there than is wanted.
    """
    paths = [*by, *(path for path in values if path is not None)]
    if paths and not content.is_json(content_type):
        raise InvalidMessage(f"its content type is {content_type!r}, and only JSON can be read")
    body = content.decode(raw, content_type, exact=True) if paths else None
    key = tuple(_key(body, path) for path in by)
    return key, [Decimal(1) if path is None else _number(body, path) for path in values]


def _at(body: Any, path: Path) -> Any:
    for step in path:
        try:
            body = body[int(step)] if isinstance(body, list) else (body if isinstance(body, dict) else {})[step]
        except (LookupError, ValueError):
            raise InvalidMessage(f"it has no {path_of(path)}") from None
    return body


def _number_text(part: str | None) -> str | None:
    """Return a part of a key as the shortest text of its number; as it is if it is none."""
    if part is None or not re.fullmatch(NUMBER, part):
        return part
    number = Decimal(part)
    return "0" if number.is_zero() else f"{number.normalize(EXACT):f}"


def _key(body: Any, path: Path) -> str | None:
    value = _at(body, path)
    if value is None:
        return None
    text = _text(value)
    if text is None or storable(text) != text:
        raise InvalidMessage(f"its {path_of(path)} is no text: {_quoted(path, value)}")
    return text


def _number(body: Any, path: Path) -> Decimal:
    value = _at(body, path)
    text = None if isinstance(value, bool) else _text(value)
    if text is None or len(text) > NUMBER_CHARS or not re.fullmatch(NUMBER, text):
        raise InvalidMessage(f"its {path_of(path)} is no number: {_quoted(path, value)}")
    return Decimal(text)


def _quoted(path: Path, value: Any) -> str:
    """Return a value as an error quotes it: not what may have secrets in it."""
    text = str(value)
    return MASK if "{" in text or any(map(NAMES.masks, path)) else repr(text[:40])


def _text(value: Any) -> str | None:
    """Return a value as ``#>>`` does; None for what has no such text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        if abs(value.adjusted()) > NUMBER_CHARS:
            return None
        return f"{value.copy_abs() if value.is_zero() else value:f}"
    return str(value) if isinstance(value, str | int) else None


_TIME = DateTime(timezone=True)
_TYPES: dict[str, Any] = {"since": _TIME, "until": _TIME, "first": Uuid(), "last": Uuid()}
_EXACT = {"smallint", "integer", "bigint", "numeric"}
_NUMBERS = _EXACT | {"real", "double precision"}


@dataclass(frozen=True, slots=True)
class Select:
    """One SELECT of a measure, on the connection of its side; ``seconds`` is how long it may take."""

    connection: Connection
    measure: Sums
    side: str
    window: Window
    seconds: float

    def check(self) -> frozenset[str]:
        """See that it can be run, and returns what it must (or it is an `InvalidSettings`); it isn't run.

        Returns which of its columns are numbers.
        """
        columns = self._run(select_columns(self.measure.selects[self.side]), self.measure.refused, _columns)
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
        return frozenset(name for name, kind in columns if kind in _NUMBERS)

    def tally(self) -> Tally:
        """Run it, and return its sums; it is a `ReconcileError` if it failed, or took too long."""
        measure = self.measure
        rows = self._run(
            select_sums(measure.selects[self.side], measure.by, measure.values),
            lambda why: ReconcileError(str(measure.refused(why))),
            lambda result: result.all(),
        )
        tally = Tally(measure.by, len(measure.values))
        for row in rows:
            tally.add(tuple(row[: len(measure.by)]), row[len(measure.by) :])
        tally.faults = [f"{self.side}: {fault}" for fault in tally.faults]
        return tally

    def _refused(self, why: str) -> OutboxError:
        return self.measure.refused(f"its {self.side} SELECT {why}")

    def _run(self, select: str, failed: Callable[[str], OutboxError], rows: Callable[[Any], Any]) -> Any:
        bare = text(select)
        used = bare.compile(dialect=self.connection.dialect).params
        if unknown := sorted(used.keys() - _TYPES.keys()):
            raise self._refused(
                f"has :{', :'.join(unknown)}; only :{', :'.join(_TYPES)} are bound, "
                "and a colon in a text is written \\:"
            )
        bound = bare.bindparams(*(bindparam(name, type_=_TYPES[name]) for name in used))
        window, ids = self.window, self.window.range
        values = {"since": window.since, "until": window.until, "first": ids.first, "last": ids.last}
        try:
            with in_savepoint(self.connection, self.seconds):
                return rows(self.connection.execute(bound, values))
        except DBAPIError as error:
            why = str(error.orig).strip()
            if sqlstate(error) == STATEMENT_CANCELLED:
                why = f"it took longer than {self.seconds:.0f} s; give it an index, or a shorter window ({why})"
            if kind_of(error) is ErrorKind.UNAVAILABLE or sqlstate(error) == SERIALIZATION_FAILURE:
                raise SourceLost(str(self.measure.refused(f"the {self.side}'s database is lost: {why}"))) from error
            raise failed(f"its {self.side} SELECT failed: {why}") from error


def _columns(result: Any) -> list[tuple[str, str]]:
    from psycopg import adapters  # noqa: PLC0415 - importing this must not pay for the driver

    kinds = [(column[0], adapters.types.get(column[1])) for column in result.cursor.description]
    return [(name, "another type" if kind is None else kind.regtype) for name, kind in kinds]


#: How long a statement of a measure may take, in seconds.
TIMEOUT = 600.0

_COMMITTED = [each for each in ProducerState if not each.withdrawn and each is not ProducerState.UNDECIDED]


@dataclass(frozen=True, slots=True)
class Checked:
    """The SELECTs of a measure by side, and which parts of its keys (by place) are numbers on one side at least."""

    selects: Mapping[str, Select]
    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Compared:
    """A pair that was compared: what is under way (`in_transit`), and after which position of each queue it began."""

    pair: Pair
    in_transit: Sequence[UUID]
    starts: Mapping[int, int] = field(default_factory=dict)


def in_transit(*tables: pa.Table) -> list[UUID]:
    """Return the ids of messages that were committed and haven't taken effect, of tables of findings (`rows.FINDING`).

    The tables are those of one comparison, before its second look: what has healed since was under way in the snapshot
    in which the measures are computed. What decides is what either side says, not the outcome:

    - The producer's part is booked if its op is a commit, whether it was dispatched, waits for that, or for its time;
      not if it is undecided, was rolled back, recalled or compensated (what ``rolled_back`` selects is booked and
      taken back again, and no message accounts for it).
    - The consumer's part isn't booked if the inbox has no row (missing, unconsumed, undispatched, resend exhausted), if
      the handler failed (its transaction was rolled back), if the message is parked or quarantined. A body that was
      changed on the way took effect if it was consumed, whatever it then said: what differs stays unexplained.
    - A business table that has the message's row proves the effect, whatever the inbox says (unrecorded). One that
      hasn't, though the message was consumed (no effect), is a hole: nothing will bring that effect any more.

    So what took effect without a booked commit (phantom, consumed though rolled back), or twice, stays unexplained.
    """
    ids = []
    for table in tables:
        booked = pc.is_in(table["state"], value_set=pa.array(_COMMITTED, pa.int8()))
        taken_back = pc.fill_null(table["compensated"], False)
        consumed = pc.fill_null(pc.equal(table["status"], int(InboxState.CONSUMED)), False)
        took_effect = pc.fill_null(pc.greater(table["effects"], 0), False)
        ids += to_uuids(table.filter(pc.and_not(pc.and_not(booked, taken_back), pc.or_(consumed, took_effect))))
    return ids


def check_measures(
    measures: Iterable[Measure],
    pairs: Iterable[Pair],
    producer: Connection,
    consumer: Connection,
    window: Window,
    *,
    seconds: float = TIMEOUT,
) -> list[Checked]:
    """See that measures can be computed, before hours are spent on a comparison; nothing is read.

    Returns their SELECTs.

    Raises:
        InvalidSettings: a measure of a pair that isn't compared, or a SELECT that can't be run, lacks a column, has
            one too many, or returns floats; names the measure and the mend.
        SourceError: a database can't be asked.
    """
    known, result = {pair.names for pair in pairs}, []
    for measure in measures:
        if (measure.topic, measure.group) not in known:
            raise measure.refused(
                f"it is of {measure.topic} → {measure.group}, which isn't compared; "
                "add that pair, or leave the measure out"
            )
        connections = {"producer": producer, "rolled_back": producer, "consumer": consumer}
        selects = {side: Select(connections[side], measure, side, window, seconds) for side in measure.selects}
        numbers = frozenset[str]().union(*(select.check() for select in selects.values()))
        result.append(Checked(selects, frozenset(at for at, name in enumerate(measure.by) if name in numbers)))
    return result


def measure_all(
    measures: Iterable[Measure],
    compared: Iterable[Compared],
    producer: Connection,
    consumer: Connection,
    window: Window,
    schema: str = "outbox",
    *,
    seconds: float = TIMEOUT,
) -> list[MeasureResult]:
    """Compute measures, in their order.

    The connections are in transactions (REPEATABLE READ READ ONLY) on the snapshots of the comparison, the consumer's
    taken first: so whatever the consumer has booked, the producer had booked before. ``schema`` is that of the outbox
    tables in the producer's database; ``seconds`` is how long a statement may take. The transactions stay as they are,
    also after an error.

    Raises:
        InvalidSettings: as `check_measures`.
        ReconcileError: a SELECT failed, or took too long.
        SourceError: a database can't be asked.
    """
    declared, known = list(measures), {one.pair.names: one for one in compared}
    pairs = [one.pair for one in known.values()]
    checked = check_measures(declared, pairs, producer, consumer, window, seconds=seconds)
    results = []
    for measure, its in zip(declared, checked, strict=True):
        one = known[measure.topic, measure.group]
        tallies = {side: select.tally() for side, select in its.selects.items()}
        tallies["in_flight"] = Bodies(producer, schema, measure, one.pair, seconds).in_transit(one.in_transit)
        if measure.producer is None:
            bodies = Bodies(producer, schema, measure, one.pair, seconds)
            tallies["producer"] = bodies.settled(window.range, one.starts)
        as_numbers = {side: tally.with_numbers(its.numbers) for side, tally in tallies.items()}
        results.append(_result(measure, one.pair, as_numbers))
    return results


def shown(by: Sequence[str], keys: Iterable[Key]) -> list[tuple[Key, Key]]:
    """Return keys, each with how it may be shown, in the order of that: their own would tell of what is masked."""
    labels = {
        key: tuple(MASK if part is not None and NAMES.masks(name) else part for name, part in zip(by, key, strict=True))
        for key in keys
    }
    return sorted(labels.items(), key=lambda pair: [(part is None, part or "") for part in pair[1]])


def side_by_side(measure: Sums, tallies: Sequence[Tally]) -> Iterator[tuple[Key, str, list[Decimal]]]:
    """Yield each key, as it may be shown, and value with what each of the tallies has of it."""
    zeros = [Decimal()] * len(measure.values)
    for key, label in shown(measure.by, {key for tally in tallies for key in tally.sums}):
        for at, value in enumerate(measure.values):
            yield label, value, [tally.sums.get(key, zeros)[at] for tally in tallies]


def _result(measure: Measure, pair: Pair, tallies: Mapping[str, Tally]) -> MeasureResult:
    nothing = Tally(measure.by, len(measure.values))
    by_side = [tallies.get(side, nothing) for side in ("producer", "rolled_back", "consumer", "in_flight")]
    rows = tuple(MeasureRow(key, value, *amounts) for key, value, amounts in side_by_side(measure, by_side))
    faults = tuple(fault for tally in tallies.values() for fault in tally.faults)
    return MeasureResult(measure.name, pair, measure.by, rows, faults)


# --- statements -----------------------------------------------------------------------------------------

#: What a body may have under a value, as text: what Python and PostgreSQL read as the same decimal.
NUMBER = r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?"
#: Its longest text.
NUMBER_CHARS = 1000

#: Half messages by their ids, as far as they are meant for the group. Rows: ``(id, content type, body, encoding)``.
HALVES_OF = f"""
SELECT h.id, h.content_type, h.body, h.headers ->> '{ENCODING_HEADER}' AS encoding
  FROM {{s}}.half_message h WHERE h.id = ANY (%(ids)b::uuid[]) AND {MATCHES}"""

#: How many of them are still there. Rows: ``(halves,)``.
COUNT_HALVES = "SELECT count(*) FROM {s}.half_message WHERE id = ANY (%(ids)b::uuid[])"

#: The half messages of a topic, from one id to another, that were committed and not taken back, as far as they are
#: meant for the group, which began after some positions, by queue. Where the newest send lies: a message that was sent
#: before the group began, and again since, is one of its own. Rows: as `HALVES_OF`.
SETTLED_HALVES = f"""
SELECT h.id, h.content_type, h.body, h.headers ->> '{ENCODING_HEADER}' AS encoding
  FROM {{s}}.half_message h JOIN {{s}}.op_message o ON o.half_id = h.id
 WHERE h.id BETWEEN %(first)s AND %(last)s AND h.topic = %(topic)s AND o.resolution = 'commit'
   AND {MATCHES}
   AND NOT EXISTS (SELECT FROM {{s}}.compensation c WHERE c.half_id = h.id)
   AND NOT EXISTS (SELECT FROM {{s}}.scheduled_message d WHERE d.half_id = h.id AND d.recalled_at IS NOT NULL)
   AND (cardinality(%(queues)s::int[]) = 0 OR NOT EXISTS (
       SELECT FROM (SELECT m.queue, m.position FROM {{s}}.message m
                     WHERE m.half_id = h.id ORDER BY m.send_number DESC LIMIT 1) n
         JOIN unnest(%(queues)s::int[], %(positions)s::bigint[]) AS s (queue, position) ON s.queue = n.queue
        WHERE n.position <= s.position))"""

#: The id that so many half messages precede. Rows: ``(id,)`` or none.
BATCH_END = """
SELECT id FROM {s}.half_message WHERE id BETWEEN %(first)s AND %(last)s ORDER BY id OFFSET %(batch)s LIMIT 1
"""

# OFFSET 0: a body is parsed once, and judged once, however many columns are taken from it (half the time). CASE: never,
# where it isn't said to be JSON, or is compressed, which the client reads then.
_SUMS = """
WITH half AS ({halves}
), part AS (
    SELECT {parts}
      FROM half h CROSS JOIN LATERAL (
           SELECT CASE WHEN h.encoding IS NULL AND (h.content_type = 'application/json'
                         OR lower(btrim(split_part(h.content_type, ';', 1))) ~ '(^application/json|[+]json)$')
                       THEN convert_from(h.body, 'UTF8')::jsonb END AS body OFFSET 0) b
    OFFSET 0
), judged AS (
    SELECT *, coalesce({good}, false) AS good FROM part OFFSET 0
)
SELECT good, count(*){columns} FROM judged GROUP BY good{keys}
"""

_IS_NUMBER = f"""jsonb_typeof({{c}}) IN ('number', 'string') AND {{c}} #>> '{{}}' ~ '^{NUMBER}$'
                 AND length({{c}} #>> '{{}}') <= {NUMBER_CHARS}"""


def next_bodies(halves: Statement, after: UUID, limit: int) -> Statement:
    """Read the next bodies. Rows: ``(id, content type, body, encoding)``, by id."""
    columns = "id, content_type, body, encoding"
    sql = f"SELECT {columns} FROM ({halves.sql}) h WHERE id > %(after)s ORDER BY id LIMIT %(limit)s"
    return Statement(sql, {**dict(halves.values), "after": after, "limit": limit})


def body_sums(halves: Statement, by: Sequence[Sequence[str]], values: Sequence[Sequence[str] | None]) -> Statement:
    """Add up what bodies carry; ``by`` and ``values`` are paths in them, None counts.

    Rows: ``(readable, messages, *key, *sums)``; those that aren't readable have neither key nor sums. A body that
    is said to be JSON, and isn't, makes the statement fail.
    """
    key = {f"k{number}": list(path) for number, path in enumerate(by)}
    added = {f"v{number}": None if path is None else list(path) for number, path in enumerate(values)}
    paths = {column: path for column, path in (key | added).items() if path is not None}
    good = [f"jsonb_typeof({column}) NOT IN ('object', 'array')" for column in key]
    good += [_IS_NUMBER.replace("{c}", column) for column in added if column in paths]
    keys = [f", CASE WHEN good THEN {column} #>> '{{}}' END" for column in key]
    sums = [
        f", sum(CASE WHEN good THEN ({column} #>> '{{}}')::numeric END)" if path else ", count(*)::numeric"
        for column, path in added.items()
    ]
    sql = _SUMS.format(
        halves=halves.sql,
        parts=", ".join(f"b.body #> %({column})s::text[] AS {column}" for column in paths) or "h.id",
        good=" AND ".join(good) or "true",
        columns="".join([*keys, *sums]),
        keys="".join(keys),
    )
    return Statement(sql, {**dict(halves.values), **paths})


def select_columns(select: str) -> str:
    """Return the SQL that gives the columns of a user's SELECT and no row."""
    return f"SELECT * FROM (\n{select}\n) AS measured LIMIT 0"


def select_sums(select: str, by: Sequence[str], values: Sequence[str]) -> str:
    """Return the SQL that adds up a user's SELECT. Rows: ``(*key, *sums)``."""
    key = [f'"{column}"::text' for column in by]
    added = [f'coalesce(sum("{column}"), 0)::numeric' for column in values]
    grouped = f" GROUP BY {', '.join(key)}" if key else ""
    return f"SELECT {', '.join([*key, *added])} FROM (\n{select}\n) AS measured{grouped}"
