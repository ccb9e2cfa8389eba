"""Alerts: what the health rules find is told to a webhook or a function when it begins and when it is over.

Once for all workers: whoever claims a minute's sample (``stats_sample``) judges what the overview judges, compares it
with what each target knows by an earlier sample, tells the changes, and writes down what the targets know now. No
transaction is open while a target is told. So:

- A target that can't be told still knows what it knew before: the next minute's worker tells it again.
- A worker that dies over it has claimed a sample and written nothing: after `_PATIENCE` another one goes on from the
  sample before. What that worker had told is told twice then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlencode, urlsplit

from outbox.database import migration
from outbox.database.execute import Template, encodings, execute
from outbox.database.migration import chain
from outbox.database.session import is_async
from outbox.errors import InvalidHandler
from outbox.message.answer import finished
from outbox.message.model import Counts
from outbox.operator.databases import Database, Databases
from outbox.operator.health.overview import HealthViews
from outbox.operator.health.rules import Diagnosis, Severity
from outbox.settings import Settings
from outbox.telemetry.events import AlertFailed
from outbox.telemetry.hooks import emit
from outbox.text import database_address, function_name

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: The pause (seconds) between two looks for a new sample.
ALERT_INTERVAL = 20.0
#: For so long (seconds) a worker that has claimed a sample may tell.
_PATIENCE = 120.0
#: How long (seconds) a webhook may take to answer.
_TIMEOUT = 10.0
#: Slack takes 50 blocks, and 3,000 characters in each.
_MOST_BLOCKS, _LONGEST_BLOCK = 20, 2_900
#: The details that tell one finding of a rule from another; the others change while it goes on.
_IDENTITY = ("topic", "group", "worker", "duty", "callback", "lock", "segment", "part")

# Of two workers, the second waits for the first, and finds it claimed. Samples are written before they can be claimed.
#: Claim the newest sample, unless a worker that claimed an earlier one may still be telling. Rows: ``(minute as text,
#: what targets know by the newest sample that says so, as JSON)``; none if there is nothing to claim.
_CLAIM = Template("""
UPDATE {s}.stats_sample n
   SET stats = stats || jsonb_build_object('alerts', jsonb_build_object('claimed', clock_timestamp()))
 WHERE sampled_at = (SELECT max(sampled_at) FROM {s}.stats_sample WHERE stats ? 'topics')
   AND NOT stats ? 'alerts'
   AND NOT EXISTS (SELECT FROM {s}.stats_sample o
                    WHERE o.sampled_at > clock_timestamp() - make_interval(secs => %(patience)s * 2)
                      AND o.stats ? 'alerts' AND NOT o.stats -> 'alerts' ? 'known'
                      AND (o.stats -> 'alerts' ->> 'claimed')::timestamptz
                          > clock_timestamp() - make_interval(secs => %(patience)s))
RETURNING sampled_at::text,
          (SELECT stats -> 'alerts' ->> 'known' FROM {s}.stats_sample o
            WHERE o.stats -> 'alerts' ? 'known' ORDER BY sampled_at DESC LIMIT 1)
""")
#: Write what the targets know now, as JSON.
_KNOW = Template("""
UPDATE {s}.stats_sample SET stats = jsonb_set(stats, '{alerts,known}', %(known)s::jsonb)
 WHERE sampled_at = %(minute)s::timestamptz
""")


@dataclass(frozen=True, slots=True)
class Alert:
    """A finding that has begun, or is over.

    ``key`` is the same for both; ``code`` is that of the rule. ``sentence`` and ``mend`` are as the doctor says them,
    when it began. ``url`` is the console's page about it, None where its address isn't known.
    """

    state: Literal["begun", "over"]
    key: str
    code: str
    severity: str
    sentence: str
    mend: str
    database: str
    url: str | None


#: Gets the changes of a minute; what it raises is logged, and it is called with them again a minute later.
AlertFunction = Callable[[Sequence[Alert]], object]


@dataclass(frozen=True, slots=True)
class AlertTarget:
    """Who is told of changes: ``target`` is the URL of a webhook, or a function.

    ``console`` is the public address of the console, ``notes``: it is told of notes too, ``codes``: of these rules
    alone.

    Raises:
        InvalidHandler: it is neither, or something of it is wrong.
    """

    name: str
    # A webhook's URL is a secret.
    target: str | AlertFunction = field(repr=False)
    console: str | None = None
    notes: bool = False
    codes: frozenset[str] | None = None

    def __post_init__(self) -> None:
        what = f"alerts {self.name!r}"
        if isinstance(self.target, str):
            if urlsplit(self.target).scheme not in {"http", "https"} or not urlsplit(self.target).hostname:
                raise InvalidHandler(f"{what}: the webhook must begin with https:// (or http://)")
            if find_spec("httpx") is None:
                raise InvalidHandler(
                    f"{what}: httpx calls it, and isn't installed: pip install 'outbox-postgres[http]'"
                )
        elif not callable(self.target) or is_async(self.target):
            raise InvalidHandler(f"{what}: give the URL of a webhook, or a plain function that takes a list of alerts")
        if self.console is not None and urlsplit(self.console).scheme not in {"http", "https"}:
            raise InvalidHandler(f"{what}: console = {self.console!r} must begin with https:// (or http://)")

    def wants(self, finding: Diagnosis) -> bool:
        """Is it to be told of a finding?"""
        if self.codes is not None:
            return finding.code in self.codes
        return self.notes or finding.severity is Severity.PROBLEM

    def alert_of(self, finding: Diagnosis, database: str) -> Alert:
        """Return what it is told when a finding begins."""
        identity = {name: str(finding.details[name]) for name in _IDENTITY if finding.details.get(name) is not None}
        key = json.dumps([finding.code, *identity.items()])
        # The console may know the database by another name.
        query = {name: value for name, value in finding.query.items() if name != "database"}
        url = None
        if self.console is not None:
            url = f"{self.console.rstrip('/')}/{finding.page}" + (f"?{urlencode(query)}" if query else "")
        return Alert("begun", key, finding.code, finding.severity.value, finding.sentence, finding.mend, database, url)

    def tell(self, alerts: Sequence[Alert]) -> None:
        """Call the webhook or the function.

        Raises:
            Exception: it couldn't be told; the text has no URL.
        """
        if isinstance(self.target, str):
            _post(self.target, payload(alerts))
        else:
            finished(self.called, self.target(alerts))

    @property
    def called(self) -> str:
        """What is called, without a secret."""
        return "the webhook" if isinstance(self.target, str) else function_name(self.target)


class WebhookFailed(Exception):
    """A webhook couldn't be called, or didn't take the alerts."""


def _post(url: str, body: Mapping[str, Any]) -> None:
    import httpx  # noqa: PLC0415 - an extra; the declaration has looked whether it is there

    try:
        # No redirects: what is told is for this address alone.
        response = httpx.post(url, json=body, timeout=_TIMEOUT, follow_redirects=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # Its text may have the URL, and so may the exceptions behind it.
        raise WebhookFailed(f"it can't be reached: {type(error).__name__}") from None
    if not response.is_success:
        raise WebhookFailed(f"it answered {response.status_code}")


def payload(alerts: Sequence[Alert]) -> dict[str, Any]:
    """Return what a webhook gets: a message as Slack takes it, with the alerts themselves as its metadata."""
    begun = sum(alert.state == "begun" for alert in alerts)
    over = len(alerts) - begun
    summary = ", ".join(text for number, text in ((begun, f"{begun} begun"), (over, f"{over} over")) if number)
    lines = [_as_mrkdwn(alert) for alert in alerts[:_MOST_BLOCKS]]
    if len(alerts) > _MOST_BLOCKS:
        lines.append(f"and {len(alerts) - _MOST_BLOCKS} more")
    return {
        "text": f"outbox: {summary}. {alerts[0].sentence}",
        "blocks": [{"type": "section", "text": {"type": "mrkdwn", "text": line}} for line in lines],
        "metadata": {"event_type": "outbox_alerts", "event_payload": {"alerts": [asdict(each) for each in alerts]}},
    }


def _as_mrkdwn(alert: Alert) -> str:
    sign = {"begun": ":red_circle:" if alert.severity == "problem" else ":large_yellow_circle:"}.get(
        alert.state, ":large_green_circle: Over:"
    )
    text = f"{sign} {alert.sentence}"
    if alert.state == "begun":
        text += f"\n{alert.mend}"
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")[:_LONGEST_BLOCK]
    return f"{escaped}\n<{alert.url}|console>" if alert.url else escaped


# --- one pass ----------------------------------------------------------------------------------------------------


def alert_once(connection: Connection, settings: Settings, targets: Mapping[str, AlertTarget]) -> Counts:
    """Tell the targets what has begun and what is over since they were told last, unless another worker does.

    ``connection`` must not be in a transaction. Returns ``taken`` changes, ``done``: told, ``failed``: not yet.
    """
    schema = settings.schema
    with connection.begin():
        (claimed,) = execute(connection, _CLAIM(schema, patience=_PATIENCE))
    if not claimed:
        return Counts()
    ((minute, text),) = claimed
    known: dict[str, dict[str, dict[str, Any]]] = json.loads(text) if text else {}
    revisions = migration.current(connection, schema)
    parts = frozenset(part for part in migration.PARTS if revisions[part] == chain.head(part))
    name = database_address(connection.engine.url)
    databases = Databases([Database(name, connection.engine, settings, parts)])
    findings = HealthViews(databases).overview("1h").findings
    counts, news = Counts(), {}
    for target in targets.values():
        before = known.get(target.name, {})
        now = {each.key: each for each in (target.alert_of(f, name) for f in findings if target.wants(f))}
        changes = [alert for key, alert in now.items() if key not in before]
        changes += [Alert(**stored | {"state": "over"}) for key, stored in before.items() if key not in now]
        if not changes:
            news[target.name] = before
            continue
        try:
            target.tell(changes)
        except Exception as error:
            emit(AlertFailed(target=target.name, called=target.called, changes=len(changes), error=error))
            news[target.name] = before
            counts += Counts(taken=len(changes), failed=len(changes))
        else:
            unchanged = {key: stored for key, stored in before.items() if key in now}
            news[target.name] = {key: asdict(alert) for key, alert in now.items()} | unchanged
            counts += Counts(taken=len(changes), done=len(changes))
    stored = json.dumps(news, ensure_ascii=bool(encodings(connection)))
    with connection.begin():
        execute(connection, _KNOW(schema, known=stored, minute=minute))
    return counts
