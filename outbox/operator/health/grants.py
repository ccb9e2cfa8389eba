"""What duties do to the tables (`outbox.database.duty`): the GRANTs that are printed, and the rights found missing.

A consumer can be kept to some topics by row security. It gets a restrictive policy of its own on each table of the
producer's that tells a message's topic, and all others a permissive one, so that nothing changes for them. The plans
stay those by index: what the statements and the policies compare is leakproof. A view with a security barrier reads
whole tables instead, and a function would be a second way to read.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from outbox.database.duty import Need, Part, duties
from outbox.database.execute import Row, Statement, Template, execute, in_schema
from outbox.database.migration.chain import VERSION_TABLE
from outbox.errors import PrivilegeMissing
from outbox.message.content import check_any_topic
from outbox.text import database_address

if TYPE_CHECKING:
    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class GrantRole:
    """What a database role is there for; the duties say which of these roles do them.

    ``member_of`` are roles of PostgreSQL itself, without which it sees or does less.
    """

    name: str
    help: str
    member_of: tuple[str, ...] = ()

    def duty_names(self, part: Part) -> set[str]:
        """Return the names of its duties in the database of a part."""
        mine = [(duty, each) for duty in duties() for each in duty.rights if self.name in each.granted]
        return {duty.name for duty, each in mine if each.part == part}

    def needs(self, part: Part) -> list[Need]:
        """Return what it needs in the database of a part."""
        return needs_of(self.duty_names(part), part)


_STATS, _SIGNAL = "pg_read_all_stats", "pg_signal_backend"
#: What a database role can be there for, by name; a role of PostgreSQL may be several of them.
ROLES: Mapping[str, GrantRole] = {
    role.name: role
    for role in (
        GrantRole("producer", "sends, prepares and decides"),
        GrantRole("worker", "is the producer's worker"),
        GrantRole("consumer", "consumes, by a worker of its own"),
        GrantRole("reconciler", "compares both sides, and repairs nothing"),
        GrantRole("viewer", "sees all that the console shows", (_STATS,)),
        GrantRole("operator", "sees it, and acts", (_STATS, _SIGNAL)),
        GrantRole("admin", "sees it, acts, moves groups, and deletes groups and topics", (_STATS, _SIGNAL)),
    )
}
#: The tables that tell a message's topic, and what a role that is kept to topics may see of them: ``{topics}``. Acts on
#: inboxes, which the consumer's own database has, are its own business.
BY_TOPIC = {
    "half_message": "topic IN ({topics})",
    "message": "topic IN ({topics})",
    "bulk_item": "action <> 'compensate' OR topic IN ({topics})",
}
_UNQUOTED = re.compile(r"[a-z_][a-z0-9_]*")
_LONGEST_NAME = 63
_PRIVILEGES = ("USAGE", "SELECT", "INSERT", "UPDATE", "DELETE")


def needs_of(names: Collection[str], part: Part) -> list[Need]:
    """Return what these duties need in the database of a part, each once; a whole table stands for its columns."""
    rights = [each for duty in duties() if duty.name in names for each in duty.rights if each.part == part]
    found = {need for each in rights for need in each.needs}
    whole = {(need.table, need.privilege) for need in found if not need.columns}
    columns: dict[tuple[str, str], set[str]] = {}
    for need in found:
        if (key := (need.table, need.privilege)) not in whole:
            columns.setdefault(key, set()).update(need.columns)
    merged = [Need(*key) for key in whole] + [Need(*key, tuple(sorted(names))) for key, names in columns.items()]
    return sorted(merged, key=lambda need: (need.table, _PRIVILEGES.index(need.privilege)))


def statements(
    role: str, grantee: str, part: Part, schema: str = "outbox", topics: Collection[str] = ()
) -> Iterator[str]:
    """Yield the SQL by which a role of PostgreSQL can be a `ROLES` role in the database of a part, without semicolons.

    ``topics``: of these only it can see messages. Once more is no error; a right not needed any more isn't revoked.
    """
    if not (needs := ROLES[role].needs(part)):
        return
    to = quoted(grantee)
    yield in_schema(f"GRANT USAGE ON SCHEMA {{s}} TO {to}", schema)
    yield in_schema(f"GRANT SELECT ON {{s}}.{VERSION_TABLE} TO {to}", schema)
    yield from granting(needs, grantee, schema)
    for statement in _policies(grantee, topics) if topics and part == "producer" else ():
        yield in_schema(statement, schema)


def granting(needs: Iterable[Need], grantee: str, schema: str = "outbox") -> Iterator[str]:
    """Yield one GRANT for each table."""
    by_table: dict[str, list[Need]] = {}
    for need in needs:
        by_table.setdefault(need.table, []).append(need)
    for table, needed in by_table.items():
        kind = "SEQUENCE " if any(need.privilege == "USAGE" for need in needed) else ""
        privileges = ", ".join(f"{need.privilege}{need.listed}" for need in needed)
        yield in_schema(f"GRANT {privileges} ON {kind}{{s}}.{table} TO {quoted(grantee)}", schema)


def _policies(grantee: str, topics: Collection[str]) -> Iterator[str]:
    """Yield what hides the messages of other topics from a role, and nothing from others."""
    only = policy_of(grantee)
    names = ", ".join(f"'{check_any_topic(topic)}'" for topic in sorted(topics))
    for table, condition in BY_TOPIC.items():
        yield f"DROP POLICY IF EXISTS all_topics ON {{s}}.{table}"
        yield f"CREATE POLICY all_topics ON {{s}}.{table} USING (true)"
        yield f"DROP POLICY IF EXISTS {only} ON {{s}}.{table}"
        yield (
            f"CREATE POLICY {only} ON {{s}}.{table} AS RESTRICTIVE FOR SELECT TO {quoted(grantee)} "
            f"USING ({condition.replace('{topics}', names)})"
        )
        yield f"ALTER TABLE {{s}}.{table} ENABLE ROW LEVEL SECURITY"


def policy_of(grantee: str) -> str:
    """Return the quoted name of the policies that keep a role to its topics; it fits into a name, and is its own."""
    name = f"topics_of_{grantee}"
    if len(name.encode()) > _LONGEST_NAME:
        name = f"topics_of_{hashlib.blake2b(grantee.encode(), digest_size=16).hexdigest()}"
    return quoted(name)


def quoted(name: str) -> str:
    """Return a name as SQL has it, with quotes where it needs them."""
    return name if _UNQUOTED.fullmatch(name) else '"' + name.replace('"', '""') + '"'


# --- missing rights --------------------------------------------------------------------------------------------------

#: Runs statements that only read, and returns the rows of each.
Read = Callable[..., list[list[Row]]]

# Tables that this database doesn't have are no matter of privileges.
_MISSING = Template("""
SELECT n.number::int
  FROM unnest(%(tables)s::text[], %(privileges)s::text[], %(columns)s::text[])
       WITH ORDINALITY n (name, privilege, columns, number)
  JOIN pg_class c ON c.relname = n.name AND c.relnamespace = to_regnamespace('{s}')
 WHERE NOT CASE WHEN n.privilege = 'USAGE' THEN has_sequence_privilege(c.oid, n.privilege)
                WHEN n.columns = '' THEN has_table_privilege(c.oid, n.privilege)
                ELSE (SELECT bool_and(has_column_privilege(c.oid, name, n.privilege))
                        FROM unnest(string_to_array(n.columns, ' ')) name) END
 ORDER BY 1
""")

#: The role of this session. One row: ``(name, name as SQL has it)``.
WHO = Statement("SELECT current_user::text, quote_ident(current_user)")

# The roles that have a policy of ours, and those that are in one of them.
_POLICIES = Template("""
SELECT DISTINCT pg_get_expr(p.polqual, p.polrelid)
  FROM pg_policy p JOIN pg_class c ON c.oid = p.polrelid
 WHERE c.relnamespace = to_regnamespace('{s}') AND c.relname IN ('half_message', 'message')
   AND NOT p.polpermissive AND starts_with(p.polname::text, 'topics_of_') AND row_security_active(c.oid)
   AND EXISTS (SELECT FROM unnest(p.polroles) r WHERE pg_has_role(r, 'USAGE'))
""")


def missing(read: Read, schema: str, needs: Collection[Need]) -> list[Need]:
    """Return which of these the role of a session lacks, on tables that are there."""
    known = list(needs)
    tables, privileges = [need.table for need in known], [need.privilege for need in known]
    columns = [" ".join(need.columns) for need in known]
    (rows,) = read(_MISSING(schema, tables=tables, privileges=privileges, columns=columns))
    return [known[number - 1] for (number,) in rows]


def hidden(read: Read, schema: str, topics: Collection[str]) -> list[str]:
    """Return of which of these topics a policy of `statements` hides the messages from the role of a session."""
    (policies,) = read(_POLICIES(schema))
    found: set[str] = set()
    for (condition,) in policies:
        # As the server wrote it, about the column `topic` alone.
        escaped = condition.replace("%", "%%")
        sql = f"SELECT topic FROM unnest(%(topics)s::text[]) t (topic) WHERE NOT ({escaped})"
        found.update(topic for (topic,) in read(Statement(sql, {"topics": sorted(topics)}))[0])
    return sorted(found)


def require_privileges(
    connection: Connection, schema: str, names: Collection[str], part: Part, topics: Collection[str] = ()
) -> None:
    """Make sure that the role of a connection may do these duties in the database of a part, and see these topics.

    Raises:
        PrivilegeMissing: it may not; says what it lacks, and what prints the SQL.
    """
    read = partial(execute, connection)
    lacks, unseen = missing(read, schema, needs_of(names, part)), hidden(read, schema, topics)
    if not lacks and not unseen:
        return
    (((name, _),),) = read(WHO)
    problems = [f"it lacks {', '.join(map(str, lacks))}"] if lacks else []
    problems += [f"row security hides its topics {', '.join(unseen)}"] if unseen else []
    options = f"--to {shlex.quote(name)} --part {part}" + ("" if schema == "outbox" else f" --schema {schema}")
    only = "".join(f" --topic {shlex.quote(topic)}" for topic in sorted(topics)) if unseen else ""
    commands = [
        f"outbox db grants --role {role} {options}{only if role == 'consumer' else ''}"
        for role in _roles_for(names, part)
    ]
    raise PrivilegeMissing(
        f"the role {name!r} may not do what it is there for ({', '.join(sorted(names))}) in "
        f"{database_address(connection.engine.url)}, schema {schema!r}: {'; '.join(problems)}. Have the owner of the "
        f"tables run what this prints: {' and '.join(commands)}"
    )


def _roles_for(names: Collection[str], part: Part) -> Iterator[str]:
    """Yield few roles that together can do these duties in the database of a part."""
    left = set(names)
    while left:
        role = max(ROLES.values(), key=lambda role: len(left & role.duty_names(part)))
        yield role.name
        left -= role.duty_names(part)
