"""A reconciliation as a TOML file::

    tier = "auto"                       # auto, digest, full
    engine = "auto"                     # auto, local, spark
    archives = ["/var/lib/outbox/archive"]

    [producer]
    url = "postgresql+psycopg://auditor@a.example/bank_a"    # without a password: it is in PGPASSFILE,
    # url_env = "BANK_A_URL"                                 # or in this environment variable
    schema = "outbox"

    [consumer]
    url_env = "BANK_B_URL"

    [[pair]]
    topic = "transfer"
    group = "bank-b"
    tags = ["large"]                    # the filter of the group's subscription, if it has one
    effect = "ledger_entry.message_id"  # the business table that has one row for each message, and its column

    [window]
    last = "24h"                        # or since and until, as 2026-03-01T00:00:00+01:00
    grace = "5m"

    [policy]
    max_resends = 3
    missing = "resend"
    parked = "alert"

    [[measure]]
    name = "debited"
    by = ["receiver"]
    values = ["transfers", "amount"]
    producer = "SELECT …"
    consumer = "SELECT …"
    in_flight = { receiver = "receiver", transfers = "*", amount = "amount" }

    [spark]
    master = "spark://master.example:7077"

Paths are meant from the file's folder on. Also: ``apply``, ``record``, ``keep_for``, ``workers``, ``actor``.
"""

from __future__ import annotations

import datetime as dt
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outbox.errors import InvalidMessage, InvalidSettings
from outbox.reconcile.measure import Measure
from outbox.reconcile.model import Access, Action, Effect, EngineName, Outcome, Pair, Tier
from outbox.reconcile.options import Job, Spark
from outbox.reconcile.parts import JobParts, access_of
from outbox.reconcile.toml import Table


def read_job(
    path: Path,
    over: JobParts | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[Access], dt.datetime] | None = None,
) -> Job:
    """Return the job of a file; what ``over`` says counts more than the file.

    ``clock`` is asked for the time if the window is one of the last hours or days; None asks the producer's database.

    Raises:
        InvalidSettings: the file can't be read, or something in it can't be right; names the file, the key, the mend.
        SourceError: the producer's database can't be asked for the time.
    """
    return read_parts(path, environ=environ).overridden(over or JobParts()).job(clock)


def read_parts(path: Path, *, environ: Mapping[str, str] = os.environ) -> JobParts:
    """Return what a file says.

    Raises:
        InvalidSettings: as `read_job`.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidSettings(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path} is no TOML: {error}") from None
    try:
        return parse(document, folder=path.parent, environ=environ)
    except (InvalidSettings, InvalidMessage) as error:
        raise InvalidSettings(f"{path}: {error}") from None


def parse(document: Mapping[str, Any], *, folder: Path = Path(), environ: Mapping[str, str] = os.environ) -> JobParts:
    """Return what a document says; paths in it begin in ``folder``.

    Raises:
        InvalidSettings: an unknown key, a value of another type, or one that can't be right; names it and the mend.
        InvalidMessage: a topic or group that isn't a name.
    """
    root = Table(document)
    pairs = tuple(_pair(table) for table in root.tables("pair"))
    window = root.table("window") or Table({}, "window")
    actions, max_resends = _policy(root.table("policy") or Table({}, "policy"))
    archives = root.texts("archives")
    parts = JobParts(
        producer=_access(root.table("producer"), environ),
        consumer=_access(root.table("consumer"), environ),
        pairs=pairs or None,
        since=window.moment("since"),
        until=window.moment("until"),
        last=window.seconds("last"),
        grace=window.seconds("grace"),
        tier=root.choice("tier", Tier),
        engine=root.choice("engine", EngineName),
        archives=None if archives is None else tuple(folder / archive for archive in archives),
        measures=tuple(_measure(table, pairs) for table in root.tables("measure")) or None,
        actions=actions,
        max_resends=max_resends,
        apply=root.flag("apply"),
        record=root.flag("record"),
        keep_for=root.seconds("keep_for"),
        workers=root.whole("workers"),
        actor=root.text("actor"),
        spark=_spark(root.table("spark"), folder),
    )
    window.done()
    root.done()
    return parts


def _access(table: Table | None, environ: Mapping[str, str]) -> Access | None:
    if table is None:
        return None
    url, variable, schema = table.text("url"), table.text("url_env"), table.text("schema")
    table.done()
    if (url is None) == (variable is None):
        raise InvalidSettings(f"{table.path('url')}: give either url or url_env, the name of an environment variable")
    if variable is not None:
        url = environ.get(variable)
        if not url:
            raise InvalidSettings(f"{table.path('url_env')}: the environment variable {variable} isn't set")
        return access_of(url, schema, variable)
    assert url is not None  # noqa: S101 - one of both is there
    return access_of(url, schema, table.path("url"), password=False)


def _pair(table: Table) -> Pair:
    topic, group = table.needed("topic"), table.needed("group")
    tags, keys, effect = table.texts("tags"), table.texts("keys"), table.text("effect")
    table.done()
    return Pair.of(topic, group, tags, keys, None if effect is None else _effect(effect, table.path("effect")))


def _effect(text: str, what: str) -> Effect:
    name, dot, column = text.rpartition(".")
    try:
        return Effect(name, column) if dot else Effect(text)
    except InvalidSettings as error:
        raise InvalidSettings(f"{what} = {text!r} must be table.column or schema.table.column: {error}") from None


def _policy(table: Table) -> tuple[dict[Outcome, Action] | None, int | None]:
    max_resends = table.whole("max_resends")
    actions = {
        kind: action for kind in Outcome if kind.differs and (action := table.choice(kind.label, Action)) is not None
    }
    table.done()
    return actions or None, max_resends


def _measure(table: Table, pairs: tuple[Pair, ...]) -> Measure:
    topic, group = table.text("topic"), table.text("group")
    if topic is None or group is None:
        if len(pairs) != 1:
            raise InvalidSettings(f"{table.path('topic')}: say of which topic and group; there isn't just one pair")
        topic, group = topic or pairs[0].topic, group or pairs[0].group
    measure = Measure(
        name=table.needed("name"),
        topic=topic,
        group=group,
        by=table.texts("by") or (),
        values=table.texts("values") or (),
        consumer=table.needed("consumer"),
        in_flight=table.mapping("in_flight") or {},
        producer=table.text("producer"),
        rolled_back=table.text("rolled_back"),
    )
    table.done()
    return measure


def _spark(table: Table | None, folder: Path) -> Spark | None:
    if table is None:
        return None
    jar = table.text("jdbc_jar")
    spark = Spark(
        master=table.text("master"),
        remote=table.text("remote"),
        jdbc_jar=None if jar is None else folder / jar,
        ui=table.flag("ui") or False,
        conf=table.mapping("conf") or {},
    )
    table.done()
    return spark
