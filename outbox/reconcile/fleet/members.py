"""The members of a fleet: each a job of two databases, with all pairs between them that the patterns choose.

Which topics there are is read in the producers' databases, and which groups in the consumers'. A topic and a group that
are named without a pattern are compared also where the group has never come: that it hasn't is the difference.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from uuid import UUID

from sqlalchemy import make_url

from outbox.database.execute import Statement, execute, statement
from outbox.database.sql import JOINED_SOURCE, topic_sql
from outbox.errors import InvalidSettings, OutboxError
from outbox.reader import Reader
from outbox.reconcile import sql
from outbox.reconcile.config import job_of
from outbox.reconcile.fleet.config import Fleet, PairPattern
from outbox.reconcile.job import NO_DATABASE, Access, Job, Outcome, Pair, Part, Progress, Repair, described
from outbox.reconcile.measure import Measure
from outbox.reconcile.source import as_time, connected

_TABLES = "SELECT to_regclass('{s}.topic') IS NOT NULL, to_regclass('{s}.consumer_offset') IS NOT NULL"
_TOPICS = "SELECT name, {s}.source_id() FROM {s}.topic"
# Of a topic that no consumer has met at its source, it isn't known which one that is.
_GROUPS = f"""
SELECT DISTINCT {topic_sql("p.topic")}, p.consumer_group, s.id
  FROM (SELECT DISTINCT topic, consumer_group FROM {{s}}.consumer_offset) p {JOINED_SOURCE}
"""
# A standby has the system identifier of its primary, and two addresses of a host may lead to one server.
#: Which server this is, whatever it is called. Rows: ``(text,)``.
_SERVER = Statement("SELECT concat_ws(' ', s.system_identifier, pg_postmaster_start_time()) FROM pg_control_system() s")

#: Sessions that write into the record while others read: the heart, and what is written.
_RECORDING = 2


@dataclass(frozen=True, slots=True)
class Known:
    """What a database knows: its topics, and the time, and its server; None where what Spark reads has none.

    And the topics, groups and sources of what it consumes, None where it isn't known; ``source`` is what it is itself.
    Of a side in ``foreign`` nothing is known but what a pattern names.
    """

    topics: frozenset[str] = frozenset()
    source: UUID | None = None
    groups: frozenset[tuple[str, str, UUID | None]] = frozenset()
    now: dt.datetime | None = None
    server: str | None = None
    foreign: Collection[Part] = ()


class Servers:
    """Which server each database is on: two names or addresses of one server are one server.

    A server is called by the address under which it was met first; one that wasn't asked, by its own.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._met: dict[str, str] = {}

    def add(self, access: Access, server: str) -> None:
        """Note which server has said that it has a database."""
        self._names[access.url] = self._met.setdefault(server, _address_of(access))

    def of(self, access: Access) -> str:
        """Return the address of the server that has a database."""
        return self._names.get(access.url) or _address_of(access)


def _address_of(access: Access) -> str:
    """Return host and port, as the URL of a database has them."""
    parts = make_url(access.url)
    host = parts.host or parts.query.get("host") or "the local socket"
    return f"{host}:{parts.port or parts.query.get('port') or 5432}"


@dataclass(frozen=True, slots=True)
class Member:
    """Two databases of a fleet, by name, and the job that compares them; ``servers`` says which server each is on."""

    producer: str
    consumer: str
    job: Job
    servers: Servers
    priority: int = 0

    @property
    def sessions(self) -> Counter[str]:
        """How many sessions it has at once at most, by server: snapshots, their readers, and the record."""
        sessions: Counter[str] = Counter()
        for access in self.job.databases.values():
            sessions[self.servers.of(access)] += 1 + self.job.workers
        if self.job.record and self.is_recorded:
            sessions[self.servers.of(self.job.recorder)] += _RECORDING
        return sessions

    @property
    def is_recorded(self) -> bool:
        """Is there a database that can have the record?"""
        return self.job.record_in is not None or "consumer" not in self.job.tables

    def __str__(self) -> str:
        return f"{self.producer} → {self.consumer}"


@dataclass(slots=True)
class Membership:
    """The members, in the order in which they are compared, and the databases that can't be asked, with the reason."""

    members: list[Member] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    servers: Servers = field(default_factory=Servers)


def members_of(fleet: Fleet, progress: Progress) -> Membership:
    """Ask the databases, and return the members.

    Raises:
        InvalidSettings: a pattern that chooses nothing, though all of its databases can be asked; a group whose topic
            two producers have; a measure that can't be; more sessions than are allowed.
    """
    found, known = Membership(), dict[str, Known]()
    progress.stage("topics and groups", len(fleet.databases))
    for number, (name, access) in enumerate(fleet.databases.items(), 1):
        try:
            known[name] = mine = _known(access, fleet.foreign.get(name, {}))
        except OutboxError as error:
            found.unreachable[name] = str(error)
        else:
            if mine.server is not None:
                found.servers.add(access, mine.server)
        progress.done(number)
    if (record_in := fleet.job.get("record_in")) is not None:
        with suppress(OutboxError):  # each job tells that it can't be reached
            found.servers.add(record_in, _server(record_in))
    chosen = _chosen(fleet, known, found.unreachable)
    for (producer, consumer), pairs in chosen.items():
        job = _job(fleet, known, producer, consumer, pairs)
        member = Member(producer, consumer, job, found.servers, max(pattern.priority for _, pattern in pairs.values()))
        for server, number in member.sessions.items():
            if number > fleet.bounds.sessions:
                raise InvalidSettings(
                    f"{member} needs {number} sessions on {server}, and sessions = {fleet.bounds.sessions}; "
                    "allow more, or set workers = 1 in [job]"
                )
        found.members.append(member)
    found.members.sort(key=lambda member: -member.priority)
    if fleet.only:
        found.members = [each for each in found.members if matching([each.producer], fleet.only)]
        found.members = [each for each in found.members if matching([each.consumer], fleet.only)]
        found.unreachable = {name: found.unreachable[name] for name in matching(found.unreachable, fleet.only)}
        if not (found.members or found.unreachable):
            raise InvalidSettings(f"nothing is compared between databases like {', '.join(fleet.only)}")
    return found


def _known(access: Access, foreign: Collection[Part]) -> Known:
    if access == NO_DATABASE:
        return Known(foreign=foreign)
    with connected(access) as connection:
        ((sends, consumes),), ((now,),), ((server,),) = execute(
            connection, statement(access.schema, _TABLES, {}), sql.CLOCK, _SERVER
        )
        sends, consumes = sends and "producer" not in foreign, consumes and "consumer" not in foreign
        if not (sends or consumes or foreign):
            raise InvalidSettings(
                f"{described(access.url)} has no tables of the outbox in schema {access.schema!r}; "
                "migrate it (`outbox db upgrade`), or name its schema"
            )
        topics, groups = (
            execute(connection, statement(access.schema, select, {}))[0] if there else []
            for there, select in ((sends, _TOPICS), (consumes, _GROUPS))
        )
    source = topics[0][1] if topics else None
    names = frozenset(topic for topic, _ in topics)
    return Known(names, source, frozenset(map(tuple, groups)), as_time(now), server, foreign)


def _server(access: Access) -> str:
    with connected(access) as connection:
        return str(execute(connection, _SERVER)[0][0][0])


#: The pairs of two databases, by topic and group, and the pattern that chose each.
_Pairs = dict[tuple[str, str], tuple[int, PairPattern]]


def _chosen(fleet: Fleet, known: Mapping[str, Known], unreachable: Mapping[str, str]) -> dict[tuple[str, str], _Pairs]:
    """Return what is compared, by producer and consumer; of several patterns of a pair the first counts."""
    chosen: dict[tuple[str, str], _Pairs] = {}
    sources: dict[tuple[str, str, str], str] = {}
    for number, pattern in enumerate(fleet.patterns, 1):
        some = False
        for producer, consumer in product(matching(known, pattern.producers), matching(known, pattern.consumers)):
            for topic, group in sorted(_pairs(pattern, producer, consumer, known)):
                some = True
                if (other := sources.setdefault((consumer, topic, group), producer)) != producer:
                    raise InvalidSettings(
                        f"compare[{number}]: both {other} and {producer} have the topic {topic!r}, and group {group!r} "
                        f"at {consumer} reads one of them; narrow producers or topics"
                    )
                chosen.setdefault((producer, consumer), {}).setdefault((topic, group), (number, pattern))
        databases = (*pattern.producers, *pattern.consumers)
        if not some and not matching(unreachable, databases):
            raise InvalidSettings(
                f"compare[{number}] chooses nothing: no producer like {', '.join(pattern.producers)} has a topic "
                f"like {', '.join(pattern.topics)} of which a consumer like {', '.join(pattern.consumers)} has a "
                f"group like {', '.join(pattern.groups)}; known databases are {', '.join(fleet.databases)}"
            )
    return chosen


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that fit a pattern, in their order."""
    return [name for name in names if matches(name, patterns)]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Does a name fit a pattern?"""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _pairs(pattern: PairPattern, producer: str, consumer: str, known: Mapping[str, Known]) -> Iterator[tuple[str, str]]:
    def of_both(patterns: Sequence[str]) -> list[str]:
        return [each.replace("{producer}", producer).replace("{consumer}", consumer) for each in patterns]

    topics, groups = of_both(pattern.topics), of_both(pattern.groups)
    sender, taker = known[producer], known[consumer]
    plain, named = ([name for name in names if not re.search(r"[*?\[]", name)] for names in (topics, groups))
    there = {*plain} if "producer" in sender.foreign else sender.topics
    found = {
        (topic, group)
        for topic, group, source in taker.groups
        if topic in there and source in {None, sender.source or source}
        if matches(topic, topics) and matches(group, groups)
    }
    # A topic and a group that a pattern names are compared though the group has never come. Of tables that aren't ours
    # all groups are named, and the topics of our own producer found.
    topics_here = matching(sorted(there), topics) if "consumer" in taker.foreign else plain
    yield from found | {(topic, group) for topic, group in product(topics_here, named) if topic in there}


def _job(fleet: Fleet, known: Mapping[str, Known], producer: str, consumer: str, pairs: _Pairs) -> Job:
    measures = [
        Reader().read(Measure, {"by": (), **measure, "topic": topic, "group": group}, f"compare[{number}].measure[{n}]")
        for (topic, group), (number, pattern) in pairs.items()
        for n, measure in enumerate(pattern.measures, 1)
    ]
    values = {
        **fleet.job,
        "producer": fleet.databases[producer],
        "consumer": fleet.databases[consumer],
        "pairs": tuple(Pair(*names, **pattern.filters) for names, (_, pattern) in pairs.items()),
        "measures": tuple(measures),
    }
    sent, taken = fleet.foreign.get(producer, {}).get("producer"), fleet.foreign.get(consumer, {}).get("consumer")
    policy = dict(fleet.job.get("policy", {}))
    if not (sent and sent.table and "opinion" in sent.columns):
        policy.pop(Outcome.OPINION_DIFFERS, None)  # it is of those members alone that have opinions
    if sent or taken:
        # What isn't ours is reported on, but for opinions; the others of the fleet are repaired.
        apply = bool(fleet.job.get("apply")) and Repair.SYNC_OPINION in policy.values()
        values |= {"producer_table": sent, "consumer_table": taken, "apply": apply}
    values["policy"] = policy
    now = known[producer].now or known[consumer].now or dt.datetime.now(dt.UTC)
    return job_of(values, lambda _: now)
