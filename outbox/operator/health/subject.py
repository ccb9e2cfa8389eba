"""A database that is judged by the rules: what is known of it, and how a rule becomes a finding about it."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import string
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outbox.operator.health.rules import LIMIT, RULES, Diagnosis, Severity, Thresholds
from outbox.operator.health.sql import WORKERS
from outbox.operator.health.workers import WorkerReport, reports
from outbox.text import at_most, counted, duration

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.check.asker import Checker
    from outbox.database.execute import Row, Statement, Template
    from outbox.settings import Settings

_SECRETS = frozenset({"password", "sslpassword"})


class _Sentences(string.Formatter):
    """Formats the templates of rules."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "duration":
            return duration(value)
        if format_spec == "quoted":
            return shlex.quote(str(value))
        one, separator, several = format_spec.removeprefix("=").partition("|")
        if not separator:
            return str(super().format_field(value, format_spec))
        if format_spec.startswith("="):
            return one if value == 1 else several
        return counted(value, one, several)


def address(url: URL) -> str:
    """Return a URL without any password."""
    query = {name: value for name, value in url.query.items() if name.lower() not in _SECRETS}
    return url.set(query=query).render_as_string(hide_password=True)


@dataclass(kw_only=True)
class Subject:
    """A database that is judged: its name, its address, and the settings with which it is used.

    ``app`` is the application's name in commands, ``checkers`` by topic are None where it isn't known. ``parts`` can be
    read. ``served``: workers should be there; the doctor is asked before the first deployment as well.
    """

    name: str
    url: URL
    settings: Settings
    app: str = "MODULE:OBJECT"
    thresholds: Thresholds = field(default_factory=Thresholds)
    checkers: Mapping[str, Checker] | None = None
    parts: Collection[str] = ()
    served: bool = False

    def read(self, *statements: Statement) -> list[list[Row]]:
        """Return the rows of statements that only read."""
        raise NotImplementedError

    def rows(self, query: Template, **values: object) -> list[Row]:
        """Return the rows of one query in this schema; it knows settings and thresholds by their names."""
        known = dataclasses.asdict(self.settings) | dataclasses.asdict(self.thresholds)
        return self.read(query(self.settings.schema, **known | values))[0]

    @cached_property
    def workers(self) -> list[WorkerReport]:
        """Return the reports of the workers."""
        return reports(self.name, self.rows(WORKERS))

    @property
    def options(self) -> str:
        """The options by which a command of ours finds this database; there is no password in its URL."""
        url, schema = shlex.quote(address(self.url)), self.settings.schema
        return f"--url {url}{'' if schema == 'outbox' else f' --schema {schema}'}"

    def finding(
        self, code: str, details: Mapping[str, Any], *, severity: Severity | None = None, **words: object
    ) -> Diagnosis:
        """Return a finding by the rule of this code; ``words`` are for its texts only."""
        rule, formatted = RULES[code], _Sentences().vformat
        values = {"at": self.options, "app": self.app, "database": self.name, **words, **details}
        page, _, names = rule.page.partition("?")
        query = {"database": self.name} if page else {}
        for name, equals, value in (each.partition("=") for each in names.split("&") if each):
            query[name] = value if equals else str(values[name])
        sentence, mend = formatted(rule.sentence, (), values), formatted(rule.mend, (), values)
        code, severity = code.partition("/")[0], severity or rule.severity
        return Diagnosis(code, severity, sentence, mend, dict(details), page, query, self.name)

    def judge(self, codes: Iterable[str], rows: Iterable[Mapping[str, Any]], limit: int = LIMIT) -> Iterator[Diagnosis]:
        """Judge rows of numbers by their rules; a count that has reached ``limit`` stopped there."""
        for row, code in itertools.product(rows, codes):
            rule = RULES[code]
            value, threshold = row[rule.value], getattr(self.thresholds, rule.over) if rule.over else 0
            if value is not None and value > threshold:
                fields = [each.partition("=") for each in rule.details.split()]
                details = {name: at_most(row[source or name], limit) for name, _, source in fields}
                yield self.finding(code, details, **row)
