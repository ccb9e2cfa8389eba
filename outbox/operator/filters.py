"""Saved filters: what a user searches for again and again, under a name, for each list of the console.

There is no table of them. To save a filter is an act, which the audit records for good: a user's filters are the last
records of their names. The conditions stand where the audit masks values by their names, as it does with bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args
from urllib.parse import parse_qsl, urlencode

from outbox.acts.changes import Actor, checked_actor, record_of
from outbox.acts.whole_acts import DELETE_FILTER, SAVE_FILTER
from outbox.database.execute import execute
from outbox.errors import ActRefused, DatabaseUnreached, InvalidRequest, NotFound
from outbox.operator.databases import Database, OverDatabases, Query, read_each

#: The lists that have filters.
FilteredList = Literal["messages", "halves", "scheduled", "inbox", "bulk-jobs", "sagas"]
#: The most filters that a user may have for a list, and fields that a filter may have.
MOST_FILTERS, _MOST_FIELDS = 50, 50
#: The fields whose text is a name and a value, which may be secret.
_PAIRS = {"body", "header"}

# Newer records than these tell: each list has few filters, and a user changes them by hand.
_RECORDS = Query("""
-- name action at conditions:json
SELECT DISTINCT ON (name) name, action, acted_at, conditions
  FROM (SELECT id, result ->> 'name' AS name, action, acted_at, (result -> 'returned')::text AS conditions
          FROM {s}.audit WHERE target = %(target)s AND action IN ('save_filter', 'delete_filter')
         ORDER BY id DESC LIMIT 1000) newest
 ORDER BY name, id DESC
""")


@dataclass(frozen=True, slots=True)
class SavedFilter:
    """A filter that a user has saved; ``query`` is the one of the list's URL."""

    columns: ClassVar[str] = "name of query"
    name: str
    of: str
    query: str


class SavedFilters(OverDatabases):
    """Show the filters that a user has saved, save and delete them.

    Each database that can be reached keeps them, and the last record of a name tells.

    Raises (of the acts):
        InvalidRequest: no such list, no condition, or too many.
        ActRefused: the user has `MOST_FILTERS` for this list.
        NotFound: there is no filter of this name to delete.
        DatabaseUnreached: no database can be reached.
    """

    def saved_filters(self, of: str, by: str) -> list[SavedFilter]:
        """Return the filters that a user has saved for a list, by name; what can't be read is left out."""
        newest: dict[str, dict[str, Any]] = {}
        target = _target(of, by)
        read = read_each(
            self.databases.values(), lambda connection, each: _RECORDS.read(connection, each.schema, target=target), []
        )
        for row in (row for rows in read.values() for row in rows):
            if row["name"] not in newest or row["at"] > newest[row["name"]]["at"]:
                newest[row["name"]] = row
        return [
            SavedFilter(name, of, _query(row["conditions"]))
            for name, row in sorted(newest.items())
            if row["action"] == SAVE_FILTER.name
        ]

    def save_filter(self, filter: str, of: str, query: str, *, by: str | Actor, why: str = "") -> str:  # noqa: A002 - as the act's row names it
        """Save the filter of a list, as its URL has it, under a name; one that has this name is replaced."""
        actor = checked_actor(SAVE_FILTER, by, why)
        try:
            pairs = parse_qsl(query, max_num_fields=_MOST_FIELDS)
        except ValueError:
            raise InvalidRequest(f"a filter may have {_MOST_FIELDS} fields at most", "query") from None
        if not pairs:
            raise InvalidRequest("the filter has no condition: search for something first", "query")
        known = [each.name for each in self.saved_filters(of, actor.name)]
        if filter not in known and len(known) >= MOST_FILTERS:
            raise ActRefused(f"{actor.name} has {MOST_FILTERS} filters of {of}, which is the most: delete one first")
        self._record(SAVE_FILTER.name, filter, of, actor, why, _conditions(pairs))
        return f"filter {filter!r} of {of} is saved"

    def delete_filter(self, filter: str, of: str, *, by: str | Actor, why: str = "") -> str:  # noqa: A002 - as the act's row names it
        """Delete a saved filter."""
        actor = checked_actor(DELETE_FILTER, by, why)
        if filter not in [each.name for each in self.saved_filters(of, actor.name)]:
            raise NotFound(f"{actor.name} has no filter {filter!r} of {of}")
        self._record(DELETE_FILTER.name, filter, of, actor, why, None)
        return f"filter {filter!r} of {of} is deleted"

    def _record(self, action: str, name: str, of: str, actor: Actor, why: str, conditions: Any) -> None:
        unreached: list[str] = [*self.databases.away]

        def write(connection: Any, each: Database) -> None:
            result = {"name": name} | ({} if conditions is None else {"returned": conditions})
            execute(connection, record_of(each.schema, action, actor, why, _target(of, actor.name), result))

        if not read_each(self.databases.values(), write, unreached, Database.acting):
            raise DatabaseUnreached(unreached)


def _target(of: str, by: str) -> str:
    if of not in get_args(FilteredList):
        raise InvalidRequest(f"of = {of!r} must be one of: {', '.join(get_args(FilteredList))}", "of")
    return f"{of} of {by}"


def _conditions(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of a filter as the audit keeps them: a name may come several times."""
    found: dict[str, Any] = {}
    for name, text in pairs:
        if name in _PAIRS and "=" in text:
            inner, _, value = text.partition("=")
            found.setdefault(name, {})[inner] = value
        else:
            found.setdefault(name, []).append(text)
    return found


def _query(conditions: Any) -> str:
    return urlencode(
        [
            (name, text)
            for name, texts in (conditions or {}).items()
            for text in (texts if isinstance(texts, list) else [f"{inner}={value}" for inner, value in texts.items()])
        ]
    )
