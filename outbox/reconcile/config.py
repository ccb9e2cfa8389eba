"""Where a job comes from: a TOML file, options of a command, a mapping in code, the subscriptions of an `Outbox`.

Each gives `Values`: what it says of the fields of `Job`, and nothing of the others. `merged` puts one over another, and
`job_of` makes the job. Each field's help says what it is for; ``docs/reconciling.md`` has a whole file. A file names a
database by ``url`` or ``url_env`` in a table ``[producer]``, ``[consumer]`` or ``[record]``, and what a side has in
place of our tables in ``[producer.tables]`` or ``[consumer.tables]``.
"""

from __future__ import annotations

import datetime as dt
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.consumer.subscription import Subscription
from outbox.database.dialect import parsed_url, url_of
from outbox.database.engines import address_of, sync_engine
from outbox.errors import InvalidMessage, InvalidSettings
from outbox.reader import Reader, variable
from outbox.reconcile.job import NO_DATABASE, Access, Job, Pair, Spark, Window, described
from outbox.reconcile.tables import ForeignTable
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.database.duty import ServedOutbox

#: The known values of the fields of `Job`, by name; of those of ``window`` and ``spark`` as a mapping of their own.
Values = Mapping[str, Any]

_EXAMPLE = "postgresql+psycopg://user@host:5432/database"


def access_of(url: str, schema: str | None = None, what: str = "url", *, password: bool = True) -> Access:
    """Return the access to a database; other settings than the schema are those of the environment.

    Raises:
        InvalidSettings: no URL of PostgreSQL with psycopg, or, without ``password``, one that has a password. Names it
            as ``what`` and shows nothing of the URL, in which a password may be anywhere.
    """
    parts = parsed_url(url, what)
    backend, _, driver = parts.drivername.partition("+")
    if backend not in {"postgresql", "postgres"} or driver not in {"", "psycopg", "psycopg_async"}:
        raise InvalidSettings(f"{what} needs PostgreSQL and psycopg 3, not {parts.drivername}; write {_EXAMPLE}")
    if not password and (parts.password or {"password", "sslpassword"} & parts.query.keys()):
        raise InvalidSettings(
            f"{what} has a password, and a file can't keep it secret; leave it out and put it into PGPASSFILE, "
            "or write url_env = the name of an environment variable that has the whole URL"
        )
    checked = parts.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    return Access(checked, Settings.from_env(schema=schema))


@dataclass(frozen=True, slots=True)
class Address:
    """How a file names a database."""

    url: str | None = None
    url_env: str | None = None
    schema: str | None = None
    tables: ForeignTable | None = None

    @property
    def is_named(self) -> bool:
        """Is there a database in it?"""
        return self.url is not None or self.url_env is not None

    def values(self, side: str, name: str, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return what it says of the fields of a job; ``name`` is that of the database's."""
        if self.tables is None:
            return {name: self.access(side, environ)}
        if side == "record":
            raise InvalidSettings("record.tables: runs are recorded in the outbox's own tables; leave it out")
        found = {f"{side}_table": self.tables}
        if not self.tables.by_spark:
            # An option or the environment may name it.
            return found | ({name: self.access(side, environ)} if self.is_named else {})
        if self.is_named:
            raise InvalidSettings(f"{side}.url: {self.tables} is read by Spark; leave the URL out")
        return found | {name: NO_DATABASE}

    def access(self, side: str, environ: Mapping[str, str]) -> Access:
        """Return the access to the database."""
        if self.url is not None and self.url_env is None:
            return access_of(self.url, self.schema, f"{side}.url", password=False)
        if self.url_env is None or self.url is not None:
            raise InvalidSettings(f"{side}.url: give either url or url_env, the name of an environment variable")
        if not (url := variable(self.url_env, environ)):
            raise InvalidSettings(f"{side}.url_env: the environment variable {self.url_env} isn't set")
        return access_of(url, self.schema, self.url_env)


def read_toml(path: Path) -> dict[str, Any]:
    """Return a file as it is.

    Raises:
        InvalidSettings: it can't be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidSettings(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path} is no TOML: {error}") from None


def read_file(path: Path, environ: Mapping[str, str] | None = None) -> Values:
    """Return what a file says. ``environ`` is that of the process unless given.

    Raises:
        InvalidSettings: the file can't be read, or something in it can't be right; names the file, the key, the mend.
    """
    document = read_toml(path)
    try:
        return read_mapping(document, environ)
    except (InvalidSettings, InvalidMessage) as error:
        raise InvalidSettings(f"{path}: {error}") from None


def read_mapping(document: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Values:
    """Return what a mapping says. ``environ`` is that of the process unless given.

    Raises:
        InvalidSettings: an unknown key, a value of another type, or one that can't be right; names it and the mend.
        InvalidMessage: a topic or group that isn't a name.
    """
    reader, values = Reader(partial=True), dict(document)
    for side, name in (("producer", "producer"), ("consumer", "consumer"), ("record", "record_in")):
        if isinstance(address := values.get(side), Mapping):
            del values[side]
            known = Reader().read(Address, address, side)
            values |= known.values(side, name, os.environ if environ is None else environ)
    if isinstance(measures := values.get("measure"), list):
        values["measure"] = [_of_a_pair(each, values.get("pair"), n) for n, each in enumerate(measures, 1)]
    return reader.values(Job, values)


def _of_a_pair(measure: Any, pairs: Any, number: int) -> Any:
    """Return a measure as a file has it, with the topic and group of the only pair unless it names its own."""
    if not isinstance(measure, Mapping):
        return measure
    values = {"by": (), "values": (), **measure}
    if not {"topic", "group"} <= measure.keys():
        if not isinstance(pairs, list) or len(pairs) != 1 or not isinstance(pairs[0], Mapping):
            raise InvalidSettings(f"measure[{number}].topic: name the topic and group; there isn't just one pair")
        values = {name: pairs[0][name] for name in ("topic", "group") if name in pairs[0]} | values
    return values


def merged(first: Values, over: Values) -> Values:
    """Return ``first`` with all that ``over`` says in its stead.

    - Pairs of ``over`` choose among those of ``first``: one of the same topic and group keeps its filter and its effect
      unless ``over`` gives them, and measures of other pairs go with their pairs.
    - ``since`` and ``last`` take each other's place. Policies are overridden kind by kind.
    """
    values = {**first, **over}
    for name in ("window", "policy", "spark"):
        if name in first and name in over:
            values[name] = {**first[name], **over[name]}
    if {"since", "last"} & over.get("window", {}).keys():
        bounds = {name: value for name, value in values["window"].items() if name not in {"since", "last"}}
        values["window"] = bounds | dict(over["window"])
    if "pairs" in over:
        known = {pair.names: pair for pair in first.get("pairs", ())}
        values["pairs"] = tuple(replace(known.get(pair.names, pair), **_filters_of(pair)) for pair in over["pairs"])
        if "measures" in first and "measures" not in over:
            chosen = {pair.names for pair in over["pairs"]}
            values["measures"] = tuple(each for each in first["measures"] if (each.topic, each.group) in chosen)
    return values


def _filters_of(pair: Pair) -> Values:
    return {name: value for name in ("tags", "keys", "headers", "effect") if (value := getattr(pair, name)) is not None}


def job_of(values: Values, clock: Callable[[Access], dt.datetime] | None = None) -> Job:
    """Return the job.

    ``clock`` is asked for the time if the window is one of the last hours; None asks the producer's database.

    Raises:
        InvalidSettings: something is missing, or doesn't fit; names the mend.
        SourceError: the producer's database can't be asked for the time.
    """
    for side in ("producer", "consumer"):
        if side not in values:
            raise InvalidSettings(f"no {side}: give the URL of its database, which may be the same as the other's")
    window = Window(**values.get("window", {})).ending(lambda: (clock or clock_of)(with_clock(values)))
    pairs = values.get("pairs", ())
    return Job(**{**values, "pairs": pairs, "window": window, "spark": Spark(**values.get("spark", {}))})


def with_clock(values: Values) -> Access:
    """Return the database whose time counts: the producer's, unless Spark reads that side from elsewhere."""
    access: Access = values["consumer" if values["producer"] == NO_DATABASE else "producer"]
    return access


def clock_of(access: Access) -> dt.datetime:
    """Ask a database for the time.

    Raises:
        SourceError: it can't be asked.
    """
    # Imported late: what only describes a job must not pay for the drivers.
    from outbox.database.execute import execute  # noqa: PLC0415 - see above
    from outbox.reconcile.source import as_time, connected  # noqa: PLC0415 - an extra
    from outbox.reconcile.sql import CLOCK  # noqa: PLC0415 - an extra

    with connected(access) as connection:
        return as_time(execute(connection, CLOCK)[0][0][0])


def subscribed(outbox: ServedOutbox, values: Values) -> list[Values]:
    """Return what the subscriptions of an Outbox say of jobs, one for each database that its groups consume from.

    ``values`` go over it, and their pairs choose among the subscriptions. Of engines only the URL counts.

    Raises:
        InvalidSettings: a pair that is no subscription, or none at all; names those that there are.
    """
    known = {key: each for key, each in outbox.functions.of(Subscription).items() if each.about is None}
    if not known:
        raise InvalidSettings("the Outbox has no consumers; import the modules that register them")
    chosen = [pair.names for pair in values["pairs"]] if "pairs" in values else list(known)
    if unknown := [":".join(names) for names in chosen if names not in known]:
        listed = ", ".join(f"{topic}:{group}" for topic, group in sorted(known))
        raise InvalidSettings(f"{unknown[0]} is no subscription of the Outbox; it has {listed}")

    jobs: dict[str, tuple[Engine | AsyncEngine | str, list[Subscription]]] = {}
    for subscription in map(known.__getitem__, chosen):
        for source in subscription.sources:
            bind = outbox.engine if source is None else source
            jobs.setdefault(address_of(bind), (bind, []))[1].append(subscription)
    consumer = own_access(outbox)
    result = []
    for bind, subscriptions in jobs.values():
        pairs = {
            (each.topic, each.group): Pair(each.topic, each.group, each.tags, each.keys, headers=each.headers)
            for each in subscriptions
        }
        own = dict(values)
        if "pairs" in own:
            own["pairs"] = tuple(pair for pair in own["pairs"] if pair.names in pairs)
        if "measures" in own:
            own["measures"] = tuple(each for each in own["measures"] if (each.topic, each.group) in pairs)
        databases = {"producer": _access(bind, outbox.settings), "consumer": consumer}
        result.append(merged({**databases, "pairs": tuple(pairs.values())}, own))
    return result


def own_access(outbox: ServedOutbox) -> Access:
    """Return the access to the database of an Outbox, by its engine."""
    return _access(outbox.engine, outbox.settings)


def only(jobs: list[Values]) -> Values:
    """Return the only one of jobs.

    Raises:
        InvalidSettings: there are several; names their databases.
    """
    if len(jobs) > 1:
        names = [
            f"{', '.join(f'{pair.topic}:{pair.group}' for pair in job['pairs'])} from {described(job['producer'].url)}"
            for job in jobs
        ]
        raise InvalidSettings(f"the groups consume from several databases, choose the pairs of one: {'; '.join(names)}")
    return jobs[0]


def _access(bind: Engine | AsyncEngine | str, settings: Settings) -> Access:
    if isinstance(bind, str):
        return Access(access_of(bind, what="the URL of a subscription's source").url, settings)
    return Access(url_of(bind).render_as_string(hide_password=False), settings, sync_engine(bind))
