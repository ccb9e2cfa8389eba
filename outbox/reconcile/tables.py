"""What a job says of a table that isn't ours: where it is, and which of its columns and values mean what to the judge.

Needs no library of the extra.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outbox.database.duty import Part
from outbox.errors import InvalidSettings
from outbox.message.model import Status
from outbox.reader import option, variable
from outbox.reconcile.measure import wrong_select

#: What of a column's name may be told apart from an expression: anything but what ends it.
_NAME = re.compile(r"[^\x00-\x1f]{1,127}")
#: Options of a Spark source whose name says that they are no secret of a file's.
_SECRET = re.compile(r"passw|secret|token|credential|access.?key|account.?key|jaas", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"passw(or)?d=|//[^/@]*:[^/@]*@", re.IGNORECASE)


class ProducerState(enum.IntEnum):
    """How far a message has come in the producer's tables; the names are those of `message_status`."""

    UNDECIDED = 0
    ROLLED_BACK = 1
    COMMITTED = 2
    SCHEDULED = 3
    RECALLED = 4
    DISPATCHED = 5

    @property
    def withdrawn(self) -> bool:
        """Was it taken back before it became a message?"""
        return self in {ProducerState.ROLLED_BACK, ProducerState.RECALLED}

    @property
    def open(self) -> bool:
        """Does it become something else by itself?"""
        return not self.withdrawn and self is not ProducerState.DISPATCHED


WITHDRAWN: tuple[ProducerState, ...] = tuple(each for each in ProducerState if each.withdrawn)


class Torn(enum.IntEnum):
    """How a message's rows in the producer's tables contradict each other."""

    NO = 0
    MESSAGE_WITHOUT_HALF = 1
    OP_WITHOUT_HALF = 2
    MESSAGE_THOUGH_ROLLED_BACK = 3
    MESSAGE_THOUGH_UNDECIDED = 4
    MESSAGE_IN_OTHER_TOPIC = 5


class InboxState(enum.IntEnum):
    """What the consumer's inbox says of a message; 0 where only the business table has it.

    What has expired counts as consumed by a handler that skipped it.
    """

    NONE = 0
    CONSUMED = 1
    FAILED = 2
    PARKED = 3
    QUARANTINED = 4

    @classmethod
    def of(cls, status: Status) -> InboxState:
        """Return what a status counts as."""
        return _COUNTS_AS.get(status) or cls[status.name]


#: What waits for an earlier message of its key, or is with a client, will be tried again.
_COUNTS_AS = {
    Status.EXPIRED: InboxState.CONSUMED,
    Status.WAITING: InboxState.FAILED,
    Status.TAKEN: InboxState.FAILED,
}


#: What stands for the opinion of a producer that has none; null does, too.
NO_OPINION = "no_opinion"

INTEGERS = ("tinyint", "smallint", "int", "bigint")
_IDS = ("string", "binary", *INTEGERS)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column: its name, and the types that Spark may call it.

    Where it isn't there, and isn't ``required``, each row has the ``default``. ``words`` are the texts that it may
    have, which stand for numbers; where it ``may_be_null``, a null stands for the default, too.
    """

    name: str
    types: tuple[str, ...]
    required: bool = False
    default: Any = None
    words: Mapping[str, int] | None = None
    may_be_null: bool = False


def _words(kind: type[enum.IntEnum]) -> dict[str, int]:
    return {each.name.lower(): each.value for each in kind}


#: One row for each message that was sent, or is to be: ``state`` is how far it has come (`ProducerState` in lower
#: case), ``at`` since when; ``sends`` how often it was sent, the last time to ``queue`` and ``position``. ``digest`` is
#: of its body, ``addressed`` whether it is meant for the group. ``opinion`` is what the producer believes the
#: consumer's ``status`` to be, or that it has no opinion.
PRODUCER_COLUMNS: tuple[TableColumn, ...] = (
    TableColumn("id", _IDS, required=True),
    TableColumn("at", ("timestamp",), required=True),
    TableColumn("state", ("string",), default="dispatched", words=_words(ProducerState)),
    TableColumn("sends", INTEGERS, default=1),
    TableColumn("queue", INTEGERS, default=0),
    TableColumn("position", INTEGERS, default=1),
    TableColumn("digest", ("string", "binary")),
    TableColumn("addressed", ("boolean",), default=True),
    TableColumn("compensated", ("boolean",), default=False),
    TableColumn(
        "opinion", ("string",), default=NO_OPINION, words={NO_OPINION: -1, **_words(InboxState)}, may_be_null=True
    ),
)

#: One row for each message that the consumer knows: ``status`` is what it says of it (`InboxState` in lower case),
#: ``changed_at`` since when, ``effects`` how many rows of it its business table has, -1 where that isn't known.
CONSUMER_COLUMNS: tuple[TableColumn, ...] = (
    TableColumn("id", _IDS, required=True),
    TableColumn("status", ("string",), default="consumed", words=_words(InboxState)),
    TableColumn("received_at", ("timestamp",)),
    TableColumn("changed_at", ("timestamp",)),
    TableColumn("attempts", INTEGERS, default=1),
    TableColumn("digest", ("string", "binary")),
    TableColumn("effects", INTEGERS, default=-1),
    TableColumn("skipped", ("boolean",), default=False),
)

#: What each side may have.
COLUMNS: Mapping[Part, tuple[TableColumn, ...]] = {"producer": PRODUCER_COLUMNS, "consumer": CONSUMER_COLUMNS}

#: The columns by which the rows of a pair are told from those of others.
NAMES: Mapping[Part, tuple[str, ...]] = {"producer": ("topic",), "consumer": ("topic", "group")}


@dataclass(frozen=True, slots=True)
class ForeignTable:
    """A table or a query that has a row for each message, in place of the outbox's own tables of a side.

    ``table`` or ``query`` is read in the side's PostgreSQL; with ``format`` Spark reads it from any of its sources, of
    the ``path`` (or table of a catalog) and the ``options``. ``columns`` says which of its columns is the judge's
    ``id``, ``at``, ``state``, … (`COLUMNS`); ``states`` what its own values of a state or status are called, and
    ``opinions`` those of an opinion. ``write`` says which of several such values is written for an opinion.
    ``options_env`` names for an option the environment variable that has it, ``options`` may hold no secret.

    Raises:
        InvalidSettings: neither or both of a table of PostgreSQL's and a source of Spark's, a query that is no SELECT,
            no id among the columns; names the mend.
    """

    table: str | None = option(None, "The table, as name or schema.name.")
    query: str | None = option(None, "A SELECT in place of a table.")
    columns: Mapping[str, str] = option(help="The judge's columns, and what the table calls them.", factory=dict)
    states: Mapping[str, str] = option(help="The table's states, and what the judge calls them.", factory=dict)
    opinions: Mapping[str, str] = option(help="The table's opinions, and what the judge calls them.", factory=dict)
    write: Mapping[str, str] = option(
        help="Of opinions for which the table has several words, the one that a repair writes.", factory=dict
    )
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

    @property
    def own_words(self) -> Mapping[str, Mapping[str, str]]:
        """Its own words, and what the judge calls them, by the judge's column; nothing where they are the judge's."""
        return {"state": self.states, "status": self.states, "opinion": self.opinions}

    @property
    def written(self) -> dict[str, str]:
        """The words that a repair writes, by what the judge calls them."""
        own = self.opinions or {word: word for word in _words(InboxState)}
        return {word: each for each, word in own.items()} | dict(self.write)

    @property
    def unwritable(self) -> str | None:
        """Why no opinion can be written into it, and the mend; None where one can be."""
        if self.table is None:
            return "an opinion can be written into a table of PostgreSQL's alone; name it by table"
        if "opinion" not in self.columns:
            return "columns names no opinion that could be written; map the column"
        several = {word: [own for own, each in self.opinions.items() if each == word] for word in _words(InboxState)}
        for word, own in several.items():
            if len(own) > 1 and word not in self.write:
                return f"opinions.{word} is written as {' or '.join(own)}: say which, as in write.{word} = {own[0]!r}"
        if self._tells_both and (strange := set(self.written.values()) - self.states.keys()):
            return f"states lacks {', '.join(sorted(strange))}, which would be written: the column has both"
        return None

    @property
    def _tells_both(self) -> bool:
        return self.columns.get("state") == self.columns["opinion"]

    def state_of(self, word: str) -> ProducerState | None:
        """Return the state that a word of an opinion tells, too; None where states have a column of their own."""
        return ProducerState[self.states[word].upper()] if self._tells_both else None

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


def wrong_columns(part: Part, table: ForeignTable) -> str | None:
    """Return the faults of the judge's columns that a table is said to have, and of its words."""
    known, names = COLUMNS[part], table.columns
    called = [*(column.name for column in known), *NAMES[part]]
    if unknown := [name for name in names if name not in called]:
        return f"columns.{unknown[0]} is none of the {part}'s columns: {', '.join(called)}"
    if missing := [column.name for column in known if column.required and column.name not in names]:
        return f"columns lacks {', '.join(missing)}, which the judge needs of the {part}"
    worded = {column.name: column.words for column in known if column.words}
    for column, title in ((next(iter(worded)), "states"), ("opinion", "opinions")):
        own, words = table.own_words[column], worded.get(column, {})
        if own and column not in names:
            return f"{title} are those of the column {column}, which columns doesn't name"
        if strange := [each for each, word in own.items() if word not in words]:
            return f"{title}.{strange[0]} = {own[strange[0]]!r} must be one of: {', '.join(words)}"
    if wrong := [word for word, own in table.write.items() if table.opinions.get(own) != word]:
        return f"write.{wrong[0]} = {table.write[wrong[0]]!r} must be one of the words that opinions calls {wrong[0]}"
    return None


#: What a human does where the tables of this side aren't ours, which our commands and workers don't know.
OF_FOREIGN: Mapping[str, tuple[Part, str]] = {
    "torn": ("producer", "find out what writes such rows; then reconcile again"),
    "consumed_though_rolled_back": (
        "producer", "undo its effect at the consumer, or do at the producer what was rolled back",
    ),
    "unrecorded": ("consumer", "write its row at the consumer, lest it takes effect once more"),
    "status_mismatch": ("consumer", "correct its row at the consumer"),
    "undispatched": ("producer", "see that what sends the producer's messages runs"),
    "resend_exhausted": ("producer", "find out why the consumer doesn't keep it"),
    "missing": ("producer", "have the producer send it once more, under its id"),
    "unconsumed": ("consumer", "see that the consumer runs and keeps up"),
    "parked": ("consumer", "mend its cause, then have the consumer try it again"),
    "failed": ("consumer", "nothing while the consumer tries it again"),
    "undecided": ("producer", "have the producer decide it"),
}  # fmt: skip
