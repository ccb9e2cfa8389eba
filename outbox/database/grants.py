"""What each duty does to the tables, declared once: the GRANTs that are printed, and the rights found missing.

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
from typing import TYPE_CHECKING, Literal

from outbox.database.execute import Row, Statement, Template, execute, in_schema
from outbox.database.migration.chain import VERSION_TABLE
from outbox.errors import PrivilegeMissing
from outbox.message.content import check_topic
from outbox.text import database_address

if TYPE_CHECKING:
    from sqlalchemy import Connection

Part = Literal["producer", "consumer"]
PARTS: tuple[Part, ...] = ("producer", "consumer")


@dataclass(frozen=True, slots=True, order=True)
class Need:
    """A privilege on a table or a sequence; on some columns only, if they are named."""

    table: str
    privilege: str
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.privilege}{self.listed} ON {self.table}"

    @property
    def listed(self) -> str:
        """The columns as SQL has them after a privilege."""
        return f" ({', '.join(self.columns)})" if self.columns else ""


@dataclass(frozen=True, slots=True)
class DutyNeeds:
    """The duties in the database that has the tables of one part, and their needs there."""

    name: str
    part: Part
    needs: tuple[Need, ...]


@dataclass(frozen=True, slots=True)
class GrantRole:
    """What a database role is there for: its duties in the database of each part, by name.

    ``member_of`` are roles of PostgreSQL itself, without which it sees or does less.
    """

    name: str
    help: str
    producer: tuple[str, ...] = ()
    consumer: tuple[str, ...] = ()
    member_of: tuple[str, ...] = ()

    def needs(self, part: Part) -> list[Need]:
        """Return what it needs in the database of a part."""
        return needs_of(self.producer if part == "producer" else self.consumer, part)


_NEED = re.compile(r"([A-Z]+)(?:\(([a-z_ ]+)\))?")


def _duty(name: str, part: Part, *shared: Mapping[str, str], **own: str) -> DutyNeeds:
    """Return a duty; each mapping says of tables ``SELECT(column …) INSERT …``."""
    needs = [
        Need(table, privilege, tuple(columns.split()))
        for tables in (*shared, own)
        for table, text in tables.items()
        for privilege, columns in _NEED.findall(text)
    ]
    return DutyNeeds(name, part, tuple(needs))


#: What the statistics are counted from, and what else the console shows.
_COUNTED = {
    "producer": "half_message half_check topic_total op_message message scheduled_message dispatch_cursor topic"
    " delivery saga saga_command",
    "consumer": "consumer_message consumer_offset log_loss reconciliation_run",
}
_SHOWN = {
    "common": "audit bulk_job bulk_item worker stats_sample",
    "producer": "check_history compensation delivery_cursor half_error producer_process topic_pause",
    "consumer": "attempt_history dead_letter_note reconciliation_run reconciliation_finding reconciliation_order"
    " segment_hold consumer_reading reread_message group_control",
}
# Of both parts, wherever the duty is done.
_BULK = {"bulk_job": "SELECT UPDATE", "bulk_item": "SELECT UPDATE", "audit": "INSERT"}
_REPORT = {"worker": "SELECT INSERT UPDATE DELETE", "stats_sample": "INSERT UPDATE SELECT"}
_RECORDS = dict.fromkeys(("worker", "stats_sample", "bulk_job", "bulk_item"), "SELECT DELETE")
# To make messages of ops.
_APPEND = {
    "op_message": "SELECT",
    "half_message": "SELECT(id topic key deliver_at queue)",
    "message": "SELECT INSERT",
    "topic": "SELECT INSERT UPDATE",
    "dispatch_cursor": "SELECT INSERT",
    "audit": "INSERT",
}
_DECIDE = {
    "half_message": "SELECT(id)",
    "half_check": "SELECT UPDATE DELETE",
    "op_message": "SELECT INSERT",
    "op_sequence": "USAGE",
}
_ACTS = _DECIDE | {"check_history": "SELECT INSERT", "topic_total": "INSERT", "compensation": "SELECT(half_id)"}
_READ_COMPENSATIONS = dict.fromkeys(("bulk_job", "bulk_item", "compensation"), "SELECT")


def _read(*tables: str) -> dict[str, str]:
    return dict.fromkeys(" ".join(tables).split(), "SELECT")


#: Each duty, where it works, and what it needs there. A need that several duties of a role share is granted once.
DUTIES = (
    _duty(
        "send",
        "producer",
        half_message="SELECT(id) INSERT",  # read for messages that a sender doesn't want sent twice
        half_check="INSERT",
        op_message="INSERT",
        op_sequence="USAGE",
        topic="SELECT(name queues)",  # where a sender chooses the queue
        producer_process="SELECT(id) INSERT UPDATE(seen_at)",
    ),
    _duty("decide", "producer", _DECIDE, half_error="INSERT"),
    _duty(
        "saga",
        "producer",
        half_message="SELECT(id topic)",
        saga="SELECT INSERT UPDATE",
        saga_command="SELECT INSERT UPDATE",
        tcc_branch="SELECT INSERT UPDATE",
    ),
    _duty(
        "flow control",
        "producer",
        half_message="SELECT(id topic)",
        half_check="SELECT(topic next_check_at parked_at)",
        op_message="SELECT",
        message="SELECT(half_id position)",
        scheduled_message="SELECT(half_id deliver_at)",
        dispatch_cursor="SELECT",
    ),
    _duty(
        "dispatch",
        "producer",
        _APPEND,
        topic_growth="INSERT",
        topic_total="INSERT",
        op_message="UPDATE",
        scheduled_message="SELECT(half_id) INSERT",
        topic_pause="SELECT",
    ),
    _duty("release", "producer", _APPEND, scheduled_message="SELECT INSERT UPDATE DELETE", topic_pause="SELECT DELETE"),
    _duty(
        "check",
        "producer",
        _DECIDE,
        half_message="SELECT",
        check_history="SELECT INSERT UPDATE DELETE",
        topic_total="INSERT",
    ),
    _duty(
        "prune",
        "producer",
        half_message="SELECT(id) DELETE",
        half_check="SELECT(half_id parked_at) DELETE",
        op_message="SELECT UPDATE DELETE",
        message="SELECT DELETE",
        check_history="SELECT(half_id) DELETE",
        topic_total="SELECT INSERT DELETE",
        scheduled_message="SELECT DELETE",
        dispatch_cursor="SELECT(id) DELETE",
        delivery="SELECT DELETE",
        delivery_cursor="SELECT DELETE",
        half_error="SELECT(half_id) DELETE",
        producer_process="SELECT DELETE",
        saga="SELECT DELETE",
        saga_command="SELECT DELETE",
        tcc_branch="SELECT DELETE",
    ),
    _duty("dead letters", "producer", half_check="SELECT", half_message="SELECT", audit="SELECT(target action) INSERT"),
    _duty("prune records", "producer", _RECORDS),
    _duty(
        "confirm",
        "producer",
        _APPEND,
        half_message="SELECT",
        op_message="UPDATE",
        scheduled_message="SELECT INSERT",
        half_check="SELECT",
        bulk_job="SELECT INSERT UPDATE",
        bulk_item="SELECT INSERT",
        compensation="SELECT",
        audit="SELECT(target action result)",
        delivery="SELECT INSERT",
        delivery_cursor="SELECT INSERT",
    ),
    _duty(
        "confirm",
        "consumer",
        _read("consumer_message consumer_offset consumer_start consumer_reading reread_message log_loss"),
    ),
    _duty(
        "compensate",
        "producer",
        _BULK,
        compensation="SELECT INSERT UPDATE",
        half_message="SELECT",
        message="SELECT",
        op_message="SELECT UPDATE",
    ),
    _duty(
        "compensate",
        "consumer",
        consumer_message="SELECT INSERT UPDATE DELETE",
        consumer_offset="SELECT",
        consumer_claim="SELECT",
        consumer_start="SELECT",
        reread_message="SELECT",
        audit="INSERT",
    ),
    _duty(
        "bulk",
        "producer",
        _BULK,
        _APPEND,
        _ACTS,
        op_message="UPDATE",
        scheduled_message="SELECT INSERT UPDATE",
        audit="SELECT(target action result)",
    ),
    _duty("report", "producer", _read(_COUNTED["producer"]), _REPORT),
    _duty(
        "consume",
        "producer",
        _READ_COMPENSATIONS,
        topic="SELECT",
        topic_growth="SELECT",
        message="SELECT",
        half_message="SELECT",
        op_message="SELECT(half_id resolution)",
    ),
    _duty(
        "consume",
        "consumer",
        consumer_message="SELECT INSERT UPDATE DELETE",
        consumer_offset="SELECT INSERT UPDATE DELETE",
        consumer_claim="SELECT INSERT",
        consumer_start="SELECT INSERT UPDATE",
        consumer_reading="SELECT",
        reread_message="INSERT",
        log_loss="INSERT",
        attempt_history="SELECT INSERT DELETE",
        group_control="SELECT INSERT UPDATE",
        rate_grant="SELECT INSERT",
        audit="INSERT",
    ),
    _duty(
        "prune",
        "consumer",
        attempt_history="SELECT DELETE",
        dead_letter_note="SELECT DELETE",
        consumer_message="SELECT DELETE",
        reread_message="SELECT DELETE",
        segment_hold="SELECT INSERT UPDATE",
        consumer_offset="SELECT DELETE",
        consumer_claim="SELECT DELETE",
        rate_grant="SELECT DELETE",
        reconciliation_run="SELECT DELETE",
        reconciliation_finding="SELECT DELETE",
        reconciliation_order="SELECT DELETE",
    ),
    _duty("dead letters", "consumer", consumer_message="SELECT", audit="SELECT(target action) INSERT"),
    _duty("prune records", "consumer", _RECORDS),
    _duty("bulk", "consumer", _BULK, consumer_message="SELECT UPDATE"),
    _duty("report", "consumer", _read(_COUNTED["consumer"], "group_control"), _REPORT),
    _duty(
        "reconcile",
        "producer",
        _read("half_message half_check op_message message scheduled_message topic compensation"),
    ),
    _duty(
        "reconcile",
        "consumer",
        _BULK,
        _read(_COUNTED["consumer"], "consumer_start consumer_reading reread_message"),
        reconciliation_run="SELECT INSERT UPDATE",
        reconciliation_finding="SELECT INSERT UPDATE",
        reconciliation_order="SELECT UPDATE",
        reconciliation_settled="SELECT INSERT DELETE",
        reconciliation_mark="SELECT INSERT UPDATE",
    ),
    _duty("look", "producer", _read(_SHOWN["common"], _SHOWN["producer"], _COUNTED["producer"])),
    _duty("look", "consumer", _read(_SHOWN["common"], _SHOWN["consumer"], _COUNTED["consumer"])),
    _duty(
        "order",
        "producer",
        audit="INSERT",
        bulk_job="INSERT UPDATE",
        bulk_item="INSERT UPDATE",
        topic_pause="INSERT UPDATE",
        # To answer a saga: that is a message.
        half_message="INSERT",
        op_message="INSERT",
        op_sequence="USAGE",
    ),
    _duty(
        "order",
        "consumer",
        audit="INSERT",
        bulk_job="INSERT UPDATE",
        bulk_item="INSERT UPDATE",
        dead_letter_note="INSERT UPDATE DELETE",
        group_control="INSERT UPDATE",
        reconciliation_order="INSERT",
    ),
    _duty(
        "groups",
        "producer",
        audit="INSERT",
        # To delete a topic.
        **dict.fromkeys(("message", "check_history", "delivery", "delivery_cursor", "half_error"), "DELETE"),
        **dict.fromkeys(("scheduled_message", "half_message", "topic_total", "topic", "topic_pause"), "DELETE"),
        topic_growth="SELECT DELETE",
        op_message="UPDATE DELETE",
    ),
    _duty(
        "groups",
        "consumer",
        audit="INSERT",
        consumer_offset="INSERT UPDATE DELETE",
        consumer_claim="SELECT INSERT DELETE",
        consumer_reading="INSERT DELETE",
        group_control="DELETE",
        rate_grant="SELECT DELETE",
        consumer_start="SELECT DELETE",
        dead_letter_note="DELETE",
        consumer_message="DELETE",
        reread_message="DELETE",
        segment_hold="DELETE",
        log_loss="DELETE",
        reconciliation_settled="SELECT DELETE",
        reconciliation_mark="SELECT DELETE",
    ),
)

_UPKEEP = ("prune", "prune records", "bulk", "report")
_STATS, _SIGNAL = "pg_read_all_stats", "pg_signal_backend"
#: What a database role can be there for, by name; a role of PostgreSQL may be several of them.
ROLES: Mapping[str, GrantRole] = {
    role.name: role
    for role in (
        GrantRole("producer", "sends, prepares and decides", ("send", "decide", "saga", "flow control")),
        GrantRole(
            "worker",
            "is the producer's worker",
            ("dispatch", "release", "check", "confirm", "compensate", "dead letters", *_UPKEEP),
            ("confirm", "compensate"),
        ),
        GrantRole("consumer", "consumes, by a worker of its own", ("consume",), ("consume", "dead letters", *_UPKEEP)),
        GrantRole("reconciler", "compares both sides, and repairs nothing", ("reconcile",), ("reconcile",)),
        GrantRole("viewer", "sees all that the console shows", ("look",), ("look",), (_STATS,)),
        GrantRole(
            "operator", "sees it, and acts", ("look", "order", "bulk"), ("look", "order", "bulk"), (_STATS, _SIGNAL)
        ),
        GrantRole(
            "admin",
            "sees it, acts, moves groups, and deletes groups and topics",
            ("look", "order", "bulk", "groups"),
            ("look", "order", "bulk", "groups"),
            (_STATS, _SIGNAL),
        ),
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


def needs_of(duties: Collection[str], part: Part) -> list[Need]:
    """Return what these duties need in the database of a part, each once; a whole table stands for its columns."""
    found = {need for duty in DUTIES if duty.part == part and duty.name in duties for need in duty.needs}
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
    names = ", ".join(f"'{check_topic(topic)}'" for topic in sorted(topics))
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
    connection: Connection, schema: str, duties: Collection[str], part: Part, topics: Collection[str] = ()
) -> None:
    """Make sure that the role of a connection may do these duties in the database of a part, and see these topics.

    Raises:
        PrivilegeMissing: it may not; says what it lacks, and what prints the SQL.
    """
    read = partial(execute, connection)
    lacks, unseen = missing(read, schema, needs_of(duties, part)), hidden(read, schema, topics)
    if not lacks and not unseen:
        return
    (((name, _),),) = read(WHO)
    problems = [f"it lacks {', '.join(map(str, lacks))}"] if lacks else []
    problems += [f"row security hides its topics {', '.join(unseen)}"] if unseen else []
    options = f"--to {shlex.quote(name)} --part {part}" + ("" if schema == "outbox" else f" --schema {schema}")
    only = "".join(f" --topic {shlex.quote(topic)}" for topic in sorted(topics)) if unseen else ""
    commands = [
        f"outbox db grants --role {role} {options}{only if role == 'consumer' else ''}"
        for role in _roles_for(duties, part)
    ]
    raise PrivilegeMissing(
        f"the role {name!r} may not do what it is there for ({', '.join(sorted(duties))}) in "
        f"{database_address(connection.engine.url)}, schema {schema!r}: {'; '.join(problems)}. Have the owner of the "
        f"tables run what this prints: {' and '.join(commands)}"
    )


def _roles_for(duties: Collection[str], part: Part) -> Iterator[str]:
    """Yield few roles that together can do these duties in the database of a part."""
    left = set(duties)
    while left:
        role = max(ROLES.values(), key=lambda role: len(left & {*getattr(role, part)}))
        yield role.name
        left -= {*getattr(role, part)}
