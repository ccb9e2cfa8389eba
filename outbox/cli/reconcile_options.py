"""What `outbox reconcile` is given: options, environment, file and application, together one job."""

from __future__ import annotations

import datetime as dt
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outbox.cli.database import URL_VARIABLE, find_settings, find_url
from outbox.cli.exits import Code, Failure
from outbox.cli.options import as_seconds, as_time
from outbox.cli.output import say
from outbox.cli.processes import load
from outbox.errors import pip_install
from outbox.reconcile.config import Values, clock_of, job_of, merged, only, read_file, subscribed
from outbox.reconcile.job import Access, Effect, EngineName, Job, Outcome, Pair, Repair

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.app import Outbox

PRODUCER_VARIABLE = "OUTBOX_PRODUCER_URL"
CONSUMER_VARIABLE = "OUTBOX_CONSUMER_URL"

ProducerOption = Annotated[
    str | None,
    typer.Option(
        "--producer",
        metavar="URL",
        help="The producer's database. Default: OUTBOX_PRODUCER_URL, the better place for a password; that of "
        "--config or --app; or OUTBOX_DATABASE_URL.",
    ),
]
ConsumerOption = Annotated[
    str | None,
    typer.Option(
        "--consumer",
        metavar="URL",
        help="The consumer's database. Default: OUTBOX_CONSUMER_URL; that of --config or --app; or the producer's.",
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE.toml", help="The job as a file; options override it.")
]
AppOption = Annotated[
    str | None,
    typer.Option(
        "--app", metavar="MODULE:OBJECT", help="Your Outbox: its groups with their filters, and their databases."
    ),
]
TopicOption = Annotated[str | None, typer.Option(help="The topic.")]
GroupOption = Annotated[str | None, typer.Option(help="The group.")]
PairOption = Annotated[
    list[str] | None, typer.Option("--pair", metavar="TOPIC:GROUP", help="A topic and a group; may be given again.")
]
TagOption = Annotated[
    list[str] | None, typer.Option("--tag", help="The group takes only this tag; may be given again.")
]
KeyOption = Annotated[
    list[str] | None, typer.Option("--key", help="The group takes only this key (may have *); may be given again.")
]
EffectOption = Annotated[
    str | None,
    typer.Option(metavar="TABLE.COLUMN", help="The consumer's table with one row for each message, and its column."),
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Messages not older: 90s, 15m, 2h, 3d, or 2026-01-31T12:00:00+00:00. Default: all there are.",
    ),
]
UntilOption = Annotated[str | None, typer.Option(metavar="TIME", help="Messages that are older. Default: now.")]
GraceOption = Annotated[
    str | None, typer.Option(metavar="DURATION", help="How long a message may be on its way. Default: 5m.")
]


@dataclass(frozen=True, slots=True)
class Asked:
    """Which databases, pairs and window are asked for."""

    producer: str | None
    consumer: str | None
    schema: str | None
    config: Path | None
    app: str | None
    topic: str | None
    group: str | None
    pairs: list[str] | None
    tags: list[str] | None
    keys: list[str] | None
    effect: str | None
    since: str | None
    until: str | None
    grace: str | None

    def job(self, options: Values | None = None) -> Job:
        """Return the job; ``options`` go over what is known from the file and the application.

        Raises:
            Failure: what was given can't be used.
            InvalidSettings: something is missing, or doesn't fit.
            SourceError: the producer's database can't be asked for the time.
        """
        values = merged(read_file(self.config) if self.config else {}, self._databases())
        outbox = _loaded(self.app) if self.app else None
        if (pairs := self._pairs(_known(values, outbox))) is not None:
            values = merged(values, {"pairs": pairs})
        if outbox is not None:
            values = only(subscribed(outbox, values))
        elif "producer" not in values:
            url = find_url(None, "--producer", PRODUCER_VARIABLE, URL_VARIABLE)
            values = {**values, "producer": self._access(url)}
        values = {"consumer": values["producer"], **values}
        if self.schema:
            databases = {side: _in_schema(values[side], self.schema) for side in ("producer", "consumer")}
            values = {**values, **databases}
        return job_of(merged(merged(values, options or {}), {"window": self._window(values["producer"])}))

    def _databases(self) -> Values:
        databases = {
            "producer": self._given(self.producer, "--producer", PRODUCER_VARIABLE),
            "consumer": self._given(self.consumer, "--consumer", CONSUMER_VARIABLE),
        }
        return {side: access for side, access in databases.items() if access is not None}

    def _given(self, url: str | None, option: str, variable: str) -> Access | None:
        if not url and not os.environ.get(variable):
            return None
        found = find_url(url, option, variable)
        if url:
            note_password(found, option, variable)
        return self._access(found)

    def _access(self, url: URL) -> Access:
        return Access(url.render_as_string(hide_password=False), find_settings(self.schema))

    def _pairs(self, known: list[Pair]) -> tuple[Pair, ...] | None:
        """Return the pairs that are asked for; a topic or a group alone chooses among those that are known."""
        names = [_pair(text) for text in self.pairs or ()]
        if self.topic and self.group:
            names.append((self.topic, self.group))
        elif self.topic or self.group:
            chosen = [pair for pair in known if self.topic in {None, pair.topic} and self.group in {None, pair.group}]
            if not chosen:
                there = ", ".join(f"{pair.topic}:{pair.group}" for pair in known)
                raise Failure(
                    f"--topic needs its --group, and --group its --topic{f'; known are {there}' if there else ''}",
                    Code.USAGE,
                )
            names += [(pair.topic, pair.group) for pair in chosen]
        if not names:
            if self.tags or self.keys or self.effect:
                raise Failure("--tag, --key and --effect are of a pair: name its topic and group", Code.USAGE)
            return None
        effect = _effect(self.effect) if self.effect else None
        return tuple(Pair.of(topic, group, self.tags, self.keys, effect) for topic, group in names)

    def _window(self, producer: Access) -> Values:
        since, until = (
            as_time(text, option) if text else (None, None)
            for text, option in ((self.since, "--since"), (self.until, "--until"))
        )
        now = clock_of(producer) if since[1] is not None or until[1] is not None else None
        grace = as_duration(self.grace, "--grace")
        window = {"since": _moment(*since, now), "until": _moment(*until, now), "grace": grace}
        return {name: value for name, value in window.items() if value is not None}


def note_password(url: URL, option: str, variable: str) -> None:
    """Say so if an option has a password, which isn't hidden there."""
    if url.password or {"password", "sslpassword"} & url.query.keys():
        say(f"note: while this runs, ps shows the password in {option} to everybody here; set {variable} instead")


def as_duration(text: str | None, option: str) -> float | None:
    """Return a duration in seconds.

    Raises:
        Failure: the text is none.
    """
    seconds = as_seconds(text) if text else None
    if text and seconds is None:
        raise Failure(f"{option} {text!r} must be a duration: 90s, 15m, 2h, 3d", Code.USAGE)
    return seconds


def as_policy(texts: Iterable[str]) -> dict[Outcome, Repair]:
    """Return what is to be done about each kind, of texts such as ``parked=retry``.

    Raises:
        Failure: a kind or an action that there isn't; names those that there are.
    """
    kinds = {kind.label: kind for kind in Outcome if kind.differs}
    actions = {}
    for text in texts:
        kind, _, action = text.partition("=")
        if kind not in kinds:
            raise Failure(f"--policy {text!r}: {kind!r} is no kind; there are {', '.join(kinds)}", Code.USAGE)
        try:
            actions[kinds[kind]] = Repair(action)
        except ValueError:
            there = ", ".join(known.value for known in Repair)
            raise Failure(f"--policy {text!r}: {action!r} is no action; there are {there}", Code.USAGE) from None
    return actions


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Say which extra is to be installed where one of its libraries isn't there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("outbox"):
            raise
        raise Failure(f"{what} needs {error.name}; {pip_install(extra)}", Code.CONFIG) from error


def check_engine(engine: EngineName | None) -> None:
    """See that an engine that was asked for is installed.

    Raises:
        Failure: it isn't.
    """
    if engine is EngineName.SPARK and importlib.util.find_spec("pyspark") is None:
        raise Failure(f"the engine spark needs pyspark; {pip_install('spark')}", Code.CONFIG)


def _known(values: Values, outbox: Outbox | None) -> list[Pair]:
    if "pairs" in values or outbox is None:
        return list(values.get("pairs", ()))
    return [Pair.of(topic, group) for topic, group in outbox.subscriptions]


def _loaded(app: str) -> Outbox:
    # Whatever it prints when it is imported is no part of the report.
    with redirect_stdout(sys.stderr):
        return load(app)


def _pair(text: str) -> tuple[str, str]:
    topic, _, group = text.partition(":")
    if not topic or not group:
        raise Failure(f"--pair {text!r} must be TOPIC:GROUP", Code.USAGE)
    return topic, group


def _effect(text: str) -> Effect:
    if "." not in text:
        raise Failure(f"--effect {text!r} must be TABLE.COLUMN, or SCHEMA.TABLE.COLUMN", Code.USAGE)
    try:
        return Effect.parse(text)
    except ValueError as error:
        raise Failure(f"--effect {text!r} must be {error}", Code.USAGE) from None


def _in_schema(access: Access, schema: str) -> Access:
    return replace(access, settings=replace(access.settings, schema=schema))


def _moment(moment: dt.datetime | None, ago: float | None, now: dt.datetime | None) -> dt.datetime | None:
    return moment if ago is None or now is None else now - dt.timedelta(seconds=ago)
