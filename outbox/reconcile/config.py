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

What is said of a job in one place, a file or a command line; several such make the job.

Read values from a table of a TOML document: of the right type, under a known name, or refused with both.

What the subscriptions of an `Outbox` say of a job: its pairs with their filters, and the databases of both sides.
"""

from __future__ import annotations

import datetime as dt
import enum
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from outbox.errors import InvalidMessage, InvalidSettings
from outbox.reconcile.measure.declaration import Measure
from outbox.reconcile.model import Access, Action, Effect, EngineName, Outcome, Pair, Tier, Window
from outbox.reconcile.options import Job, Policy, Spark
from outbox.reconcile.source import place
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.app import Outbox
    from outbox.consumer.subscription import Subscription

_EXAMPLE = "postgresql+psycopg://user@host:5432/database"


def access_of(url: str, schema: str | None = None, what: str = "url", *, password: bool = True) -> Access:
    """Return the access to a database; other settings than the schema are those of the environment.

    Raises:
        InvalidSettings: no URL of PostgreSQL with psycopg, or, without ``password``, one that has a password. Names it
            as ``what`` and shows nothing of the URL, in which a password may be anywhere.
    """
    try:
        parts = make_url(url)
    except (ArgumentError, ValueError):
        raise InvalidSettings(f"{what} can't be read as a URL; it must look like {_EXAMPLE}") from None
    backend, _, driver = parts.drivername.partition("+")
    if backend not in {"postgresql", "postgres"} or driver not in {"", "psycopg", "psycopg_async"}:
        raise InvalidSettings(f"{what} needs PostgreSQL and psycopg 3, not {parts.drivername}; write {_EXAMPLE}")
    if not password and (parts.password or {"password", "sslpassword"} & parts.query.keys()):
        raise InvalidSettings(
            f"{what} has a password, and a file is no place for it; leave it out and put it into PGPASSFILE, "
            "or write url_env = the name of an environment variable that has the whole URL"
        )
    settings = Settings.from_env() if schema is None else Settings.from_env(schema=schema)
    return Access(parts.set(drivername="postgresql+psycopg").render_as_string(hide_password=False), settings)


@dataclass(frozen=True, slots=True)
class JobParts:
    """What was said of a job; None is "nothing". The fields are those of `Job`, `Window` and `Policy`.

    ``last`` (seconds) is a window that ends now, in place of ``since``.
    """

    producer: Access | None = None
    consumer: Access | None = None
    pairs: tuple[Pair, ...] | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    last: float | None = None
    grace: float | None = None
    tier: Tier | None = None
    engine: EngineName | None = None
    archives: tuple[Path, ...] | None = None
    measures: tuple[Measure, ...] | None = None
    actions: Mapping[Outcome, Action] | None = None
    max_resends: int | None = None
    apply: bool | None = None
    record: bool | None = None
    keep_for: float | None = None
    workers: int | None = None
    actor: str | None = None
    spark: Spark | None = None

    def overridden(self, by: JobParts) -> JobParts:
        """Return these parts with all that ``by`` says in place of what is said here.

        - Pairs of ``by`` choose among those here: one of the same topic and group keeps its filter and its effect
          unless ``by`` gives them, and measures of other pairs go with their pairs.
        - ``since`` and ``last`` take each other's place. Actions are overridden kind by kind.
        """
        said = {f.name: value for f in fields(by) if (value := getattr(by, f.name)) is not None}
        if by.pairs is not None:
            said["pairs"] = tuple(self._known(pair) for pair in by.pairs)
            chosen = {(pair.topic, pair.group) for pair in by.pairs}
            ours = [measure for measure in self.measures or () if (measure.topic, measure.group) in chosen]
            said.setdefault("measures", tuple(ours))
        if by.since is not None or by.last is not None:
            said |= {"since": by.since, "last": by.last}
        if by.actions is not None:
            said["actions"] = {**(self.actions or {}), **by.actions}
        return replace(self, **said)

    def job(self, clock: Callable[[Access], dt.datetime] | None = None) -> Job:
        """Return the job.

        ``clock`` is asked for the time if the window is one of the last hours; None asks the producer's database.

        Raises:
            InvalidSettings: something is missing, or doesn't fit; names the mend.
            SourceError: the producer's database can't be asked for the time.
        """
        producer, consumer = self._needed("producer"), self._needed("consumer")
        policy = {"actions": self.actions, "max_resends": self.max_resends}
        rest = ("tier", "engine", "archives", "measures", "apply", "record", "keep_for", "workers", "actor", "spark")
        return Job(
            producer=producer,
            consumer=consumer,
            pairs=self.pairs or (),
            window=self._window(producer, clock or clock_of),
            policy=Policy(**_said(policy)),
            **_said({name: getattr(self, name) for name in rest}),
        )

    def _window(self, producer: Access, clock: Callable[[Access], dt.datetime]) -> Window:
        since = self.since
        if self.last is not None:
            if since is not None:
                raise InvalidSettings("since and last exclude each other; give one")
            since = (self.until or clock(producer)) - dt.timedelta(seconds=self.last)
        return Window(**_said({"since": since, "until": self.until, "grace": self.grace}))

    def _known(self, pair: Pair) -> Pair:
        for own in self.pairs or ():
            if (own.topic, own.group) == (pair.topic, pair.group):
                given = {name: getattr(pair, name) for name in ("tags", "keys", "effect")}
                return replace(own, **_said(given))
        return pair

    def _needed(self, side: str) -> Access:
        access: Access | None = getattr(self, side)
        if access is None:
            raise InvalidSettings(f"no {side}: give the URL of its database, which may be the same as the other's")
        return access


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def clock_of(access: Access) -> dt.datetime:
    """Ask a database for the time.

    Raises:
        SourceError: it can't be asked.
    """
    # Imported late: what only describes a job must not pay for the drivers.
    from outbox.database.execute import execute  # noqa: PLC0415
    from outbox.reconcile.source import as_time, engine_of, reaching  # noqa: PLC0415
    from outbox.reconcile.sql import clock  # noqa: PLC0415

    engine = engine_of(access)
    try:
        with reaching(access), engine.begin() as connection:
            return as_time(execute(connection, clock())[0][0][0])
    finally:
        engine.dispose()


E = TypeVar("E", bound=enum.StrEnum)
T = TypeVar("T")

_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[wdhms])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([wdhms])")
_SECONDS = {"w": 604800.0, "d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_KINDS = {str: "a text", bool: "true or false", int: "a whole number", list: "a list", dict: "a table"}


def seconds_of(value: object, what: str) -> float:
    """Return a duration: seconds as a number, or a text such as ``90s``, ``5m``, ``1h30m``, ``24h``, ``7d``, ``2w``.

    Raises:
        InvalidSettings: it is none; names it as ``what``.
    """
    if isinstance(value, str) and _DURATION.fullmatch(value):
        return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise InvalidSettings(f"{what} = {value!r} is no duration; write seconds, or a text such as '90s', '1h30m' or '7d'")


def moment_of(value: object, what: str) -> dt.datetime:
    """Return a time with its zone, also from ISO text.

    Raises:
        InvalidSettings: it is none; names it as ``what``.
    """
    moment = value
    if isinstance(value, str):
        try:
            moment = dt.datetime.fromisoformat(value)
        except ValueError:
            moment = None
    if not isinstance(moment, dt.datetime) or moment.tzinfo is None:
        shown = value.isoformat() if isinstance(value, dt.date) else repr(value)
        raise InvalidSettings(f"{what} = {shown} is no time with a zone; write it as 2026-03-01T00:00:00+01:00")
    return moment


class Table:
    """A table of a document. ``name`` is how it is called in errors; every key must be asked for before `done`."""

    def __init__(self, values: Mapping[str, Any], name: str = "") -> None:
        self._values, self._name = values, name
        self._known: list[str] = []

    def text(self, key: str) -> str | None:
        """Return a text."""
        return self._typed(key, str)

    def flag(self, key: str) -> bool | None:
        """Return true or false."""
        return self._typed(key, bool)

    def whole(self, key: str) -> int | None:
        """Return a whole number."""
        return self._typed(key, int)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a list of texts."""
        values = self._typed(key, list)
        if values is not None and not all(isinstance(value, str) for value in values):
            raise InvalidSettings(f"{self.path(key)} = {values!r} must be a list of texts")
        return None if values is None else tuple(values)

    def mapping(self, key: str) -> dict[str, str] | None:
        """Return a table of texts."""
        values = self._typed(key, dict)
        for name, value in (values or {}).items():
            if not isinstance(value, str):
                raise InvalidSettings(f"{self.path(key)}.{name} = {value!r} must be a text")
        return values

    def seconds(self, key: str) -> float | None:
        """Return a duration in seconds (`seconds_of`)."""
        value = self._value(key)
        return None if value is None else seconds_of(value, self.path(key))

    def moment(self, key: str) -> dt.datetime | None:
        """Return a time (`moment_of`)."""
        value = self._value(key)
        return None if value is None else moment_of(value, self.path(key))

    def choice(self, key: str, kind: type[E]) -> E | None:
        """Return one of the values of an enumeration."""
        text = self.text(key)
        try:
            return None if text is None else kind(text)
        except ValueError:
            raise InvalidSettings(
                f"{self.path(key)} = {text!r} is unknown; choose one of {', '.join(one.value for one in kind)}"
            ) from None

    def table(self, key: str) -> Table | None:
        """Return a table inside this one."""
        values = self._typed(key, dict)
        return None if values is None else Table(values, self.path(key))

    def tables(self, key: str) -> list[Table]:
        """Return the tables of a ``[[list]]``, none if it isn't there."""
        values = self._typed(key, list) or []
        for value in values:
            if not isinstance(value, dict):
                raise InvalidSettings(f"{self.path(key)} must be a list of tables; write [[{self.path(key)}]]")
        return [Table(value, f"{self.path(key)}[{number}]") for number, value in enumerate(values, 1)]

    def needed(self, key: str) -> str:
        """Return a text that must be there."""
        text = self.text(key)
        if text is None:
            raise InvalidSettings(f"{self.path(key)} is missing; it must be a text")
        return text

    def path(self, key: str) -> str:
        """Return how a value is called in errors: ``window.since``."""
        return f"{self._name}.{key}" if self._name else key

    def done(self) -> None:
        """Refuse what nobody asked for.

        Raises:
            InvalidSettings: names the key, and those that are known.
        """
        for key in self._values:
            if key not in self._known:
                close = get_close_matches(key, self._known, 1)
                mend = f"did you mean {close[0]}?" if close else f"known are {', '.join(self._known)}"
                raise InvalidSettings(f"{self.path(key)} is unknown; {mend}")

    def _value(self, key: str) -> Any:
        self._known.append(key)
        return self._values.get(key)

    def _typed(self, key: str, kind: type[T]) -> T | None:
        value = self._value(key)
        # A bool is an int to Python, and not to the reader of a file.
        if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        raise InvalidSettings(f"{self.path(key)} = {value!r} must be {_KINDS[kind]}")


def read_job(
    path: Path,
    over: JobParts | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    clock: Callable[[Access], dt.datetime] | None = None,
) -> Job:
    """Return the job of a file; what ``over`` says counts more than the file.

    ``clock`` is asked for the time if the window is one of the last hours or days; None asks the producer's database.

    Raises:
        InvalidSettings: the file can't be read, or something in it can't be right; names the file, the key, the mend.
        SourceError: the producer's database can't be asked for the time.
    """
    return read_parts(path, environ=environ).overridden(over or JobParts()).job(clock)


def read_parts(path: Path, *, environ: Mapping[str, str] | None = None) -> JobParts:
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


def parse(document: Mapping[str, Any], *, folder: Path = Path(), environ: Mapping[str, str] | None = None) -> JobParts:
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


def _access(table: Table | None, environ: Mapping[str, str] | None) -> Access | None:
    if table is None:
        return None
    url, variable, schema = table.text("url"), table.text("url_env"), table.text("schema")
    table.done()
    if (url is None) == (variable is None):
        raise InvalidSettings(f"{table.path('url')}: give either url or url_env, the name of an environment variable")
    if variable is not None:
        url = (os.environ if environ is None else environ).get(variable)
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


def parts_of(outbox: Outbox, wanted: JobParts | None = None) -> list[JobParts]:
    """Return what is known of the jobs of an Outbox, one for each database that its groups consume from.

    ``wanted`` overrides it, and its pairs choose among the subscriptions. Of engines only the URL counts.

    Raises:
        InvalidSettings: a pair that is no subscription, or none at all; names those that there are.
    """
    wanted = wanted or JobParts()
    jobs: dict[str, list[Subscription]] = {}
    for subscription in _chosen(outbox, wanted):
        source = _url(outbox.engine if subscription.source is None else subscription.source)
        jobs.setdefault(source, []).append(subscription)
    consumer = Access(_url(outbox.engine), outbox.settings)
    return [
        JobParts(
            producer=Access(source, outbox.settings),
            consumer=consumer,
            pairs=tuple(Pair.of(each.topic, each.group, each.tags, each.keys) for each in subscriptions),
        ).overridden(_narrowed(wanted, subscriptions))
        for source, subscriptions in jobs.items()
    ]


def one_of(jobs: list[JobParts]) -> JobParts:
    """Return the only one of jobs.

    Raises:
        InvalidSettings: there are several; names their databases.
    """
    if len(jobs) > 1:
        places = "; ".join(f"{_pairs(job)} from {place(job.producer.url)}" for job in jobs if job.producer)
        raise InvalidSettings(f"the groups consume from several databases, choose the pairs of one: {places}")
    return jobs[0]


def _chosen(outbox: Outbox, wanted: JobParts) -> list[Subscription]:
    known = outbox.subscriptions
    if not known:
        raise InvalidSettings("the Outbox has no consumers; import the modules that register them")
    if wanted.pairs is None:
        return list(known.values())
    for pair in wanted.pairs:
        if (pair.topic, pair.group) not in known:
            there = ", ".join(f"{topic}:{group}" for topic, group in sorted(known))
            raise InvalidSettings(f"{pair.topic}:{pair.group} is no subscription of the Outbox; it has {there}")
    return [known[pair.topic, pair.group] for pair in wanted.pairs]


def _narrowed(wanted: JobParts, subscriptions: list[Subscription]) -> JobParts:
    """Return what is wanted of these subscriptions."""
    names = {(each.topic, each.group) for each in subscriptions}

    def ours(topic: str, group: str) -> bool:
        return (topic, group) in names

    pairs = None if wanted.pairs is None else tuple(pair for pair in wanted.pairs if ours(pair.topic, pair.group))
    measures = wanted.measures and tuple(each for each in wanted.measures if ours(each.topic, each.group))
    return replace(wanted, pairs=pairs, measures=measures)


def _pairs(job: JobParts) -> str:
    return ", ".join(f"{pair.topic}:{pair.group}" for pair in job.pairs or ())


def _url(bind: Engine | AsyncEngine | str) -> str:
    text = bind if isinstance(bind, str) else bind.url.render_as_string(hide_password=False)
    return access_of(text, what="the URL of a subscription's source").url
