"""Examine the privileges of a connection's role: a missing one fails in the middle of a night otherwise."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from outbox.database.dialect import url_of
from outbox.database.duty import PARTS, Part
from outbox.database.engines import address_of, engine_of
from outbox.database.execute import execute
from outbox.database.grants import ROLES, WHO, Read, granting, hidden, missing
from outbox.database.sql import read_only
from outbox.operator.health.rules import NotInspected
from outbox.text import database_address, summary_of

if TYPE_CHECKING:
    from outbox.consumer.subscription import Subscription
    from outbox.database.engines import Bind
    from outbox.operator.health.examination import Examination
    from outbox.operator.health.rules import Diagnosis

_SHOWN = 3


def privileges(examination: Examination) -> Iterator[Diagnosis]:
    """Find which privileges the role lacks, here and in the databases that its groups read; and hidden topics."""
    schema, installed = examination.settings.schema, [part for part in PARTS if part in examination.parts]
    if examination.roles is None:
        if any(missing(examination.read, schema, ROLES[role].needs(part)) for role in ROLES for part in installed):
            raise NotInspected("it isn't known what this role is there for; say it by --role, or by --app")
        return
    remote: defaultdict[str, list[Subscription]] = defaultdict(list)
    here: list[Subscription] = []
    for each in examination.subscriptions or ():
        source = None if each.source is None else address_of(each.source)
        (here if source in {None, address_of(examination.url)} else remote[source or ""]).append(each)
    for role in examination.roles:
        for part in installed:
            if not (role == "consumer" and part == "producer" and remote and not here):
                yield from _lacking(examination, examination.read, role, part, examination.name)
    if "producer" in installed:
        yield from _unseen(examination, examination.read, here, examination.name)
    if "consumer" in examination.roles:
        for address, groups in remote.items():
            yield from _of_source(examination, address, groups)


def _of_source(examination: Examination, address: str, groups: Collection[Subscription]) -> Iterator[Diagnosis]:
    source = next(each.source for each in groups if each.source is not None)
    name = str(url_of(source).database)
    try:
        with _read_only(source, examination.thresholds.statement) as read:
            yield from _lacking(examination, read, "consumer", "producer", name)
            yield from _unseen(examination, read, groups, name)
    except DBAPIError as error:
        address = database_address(url_of(source))
        raise NotInspected(
            f"{address}, which the groups read, was not inspected: {summary_of(error.orig or error)}"
        ) from error


@contextmanager
def _read_only(source: Bind, seconds: float) -> Iterator[Read]:
    with engine_of(source).connect() as connection, connection.begin():
        execute(connection, read_only(seconds))
        yield partial(execute, connection)


def _lacking(examination: Examination, read: Read, role: str, part: Part, database: str) -> Iterator[Diagnosis]:
    schema = examination.settings.schema
    if lacks := missing(read, schema, ROLES[role].needs(part)):
        (((name, quoted),),) = read(WHO)
        others = f", and {len(lacks) - _SHOWN} more" if len(lacks) > _SHOWN else ""
        details = {"role": name, "role_of_ours": role, "part": part, "missing": [str(need) for need in lacks]}
        words = {
            "count": len(lacks),
            "first": ", ".join(str(need) for need in lacks[:_SHOWN]),
            "others": others,
            "grants": " ".join(f"{grant};" for grant in granting(lacks, name, schema)),
            "quoted_role": quoted,
            "database": database,
            "schema": _option(schema),
        }
        yield examination.finding("privilege.missing", details, **words)


def _unseen(
    examination: Examination, read: Read, groups: Collection[Subscription], database: str
) -> Iterator[Diagnosis]:
    schema, topics = examination.settings.schema, sorted({each.topic for each in groups})
    if not (unseen := hidden(read, schema, topics)):
        return
    (((name, quoted),),) = read(WHO)
    for each in groups:
        if each.topic in unseen:
            details = {"role": name, "topic": each.topic, "group": each.group}
            named = "".join(f" --topic {shlex.quote(topic)}" for topic in topics)
            words = {"quoted_role": quoted, "database": database, "schema": _option(schema), "topics": named}
            yield examination.finding("topic.hidden", details, **words)


def _option(schema: str) -> str:
    return "" if schema == "outbox" else f" --schema {schema}"
