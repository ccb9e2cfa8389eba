"""What is said of a job in one place, a file or a command line; several such make the job."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from outbox.errors import InvalidSettings
from outbox.reconcile.measure import Measure
from outbox.reconcile.model import Access, Action, EngineName, Outcome, Pair, Tier, Window
from outbox.reconcile.options import Job, Policy, Spark
from outbox.settings import Settings

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
    from outbox.reconcile.snapshots import as_time, engine_of, reaching  # noqa: PLC0415
    from outbox.store.execute import execute  # noqa: PLC0415
    from outbox.store.reconcile import clock  # noqa: PLC0415

    engine = engine_of(access)
    try:
        with reaching(access), engine.begin() as connection:
            return as_time(execute(connection, clock())[0][0][0])
    finally:
        engine.dispose()
