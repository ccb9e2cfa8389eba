"""Settings: one frozen object, from code or from ``OUTBOX_*`` variables, refused when they contradict."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from outbox.errors import InvalidSettings

#: RocketMQ's retry table (retries 1-16), in seconds: 10 s, 30 s, 1 m ... 2 h.
RETRY_DELAYS = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)

_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,49}", re.ASCII)
_HOUR = 3600.0

_POSITIVE = (
    *("queues", "max_body_bytes", "read_ahead", "read_ahead_bytes", "max_claims", "dispatch_batch", "prune_batch"),
    *("retention", "inbox_retention", "record_retention"),
    *("idle_wait", "retry_interval", "release_interval", "prune_interval"),
    *("reconnect_cap", "check_interval", "max_checks", "check_timeout", "check_time_limit", "checks_in_flight"),
    "check_batch",
)
_NOT_NEGATIVE = ("immunity", "drain_timeout", "max_undecided", "max_undispatched")
#: What the columns hold; threads, connections and locks that no set-up has more of; what the server takes as a time.
_AT_MOST = {
    "immunity": 100 * 366 * 86400 - 1,
    "check_interval": 100 * 366 * 86400 - 1,
    "check_time_limit": 86400,
    "queues": 4096,
    "max_checks": 2**31 - 1,
    "max_claims": 2**15 - 1,
    "checks_in_flight": 1000,
    "check_batch": 1000,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one `Outbox`; durations are seconds.

    ``retention`` keeps decided halves, their ops and messages; ``inbox_retention`` keeps inbox rows, and
    must outlive the former by the retry horizon, or a message could be delivered again to an inbox that
    has forgotten it. ``record_retention`` keeps what reconciliations found. ``max_claims`` is how often a message may
    be started without ever finishing (the process died) before it is parked.

    Of the check, with RocketMQ's defaults (``BrokerConfig``): ``immunity`` (transactionTimeOut) is how long a half is
    left alone, ``check_interval`` (transactionCheckInterval) the pause between two checks, ``max_checks``
    (transactionCheckMax) how often a checker is asked before the half is parked, ``check_time_limit``
    (MAX_PROCESS_TIME_LIMIT) how long a pass begins new checks, ``checks_in_flight`` (the check's thread pool) how many
    checkers run at once in a worker. ``check_timeout`` is how long a checker may take, ``check_batch`` how many fences
    are tried in one transaction.

    ``max_undecided`` and ``max_undispatched`` make producers of a topic fail with `OutboxBusy` while so many of its
    halves wait for a decision, or so many of its committed ops for dispatch; 0 is no limit.

    Raises:
        InvalidSettings: a value out of range, or two that contradict each other.
    """

    schema: str = "outbox"
    queues: int = 8
    max_body_bytes: int = 4 * 1024 * 1024
    read_ahead: int = 500
    read_ahead_bytes: int = 16 * 1024 * 1024

    immunity: float = 6.0
    check_interval: float = 30.0
    max_checks: int = 15
    check_timeout: float = 10.0
    check_time_limit: float = 60.0
    checks_in_flight: int = 5
    check_batch: int = 200

    max_undecided: int = 0
    max_undispatched: int = 0

    retry_delays: tuple[float, ...] = field(default=RETRY_DELAYS)
    retry_jitter: float = 0.1
    max_claims: int = 10

    dispatch_batch: int = 10_000
    prune_batch: int = 1_000
    retention: float = 72 * _HOUR
    inbox_retention: float = 2 * 72 * _HOUR
    record_retention: float = 90 * 24 * _HOUR

    idle_wait: float = 0.2
    retry_interval: float = 1.0
    release_interval: float = 0.5
    prune_interval: float = 60.0
    drain_timeout: float = 30.0
    reconnect_cap: float = 15.0
    listen: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        if self.schema.startswith("pg_"):
            raise InvalidSettings(f"schema {self.schema!r} is reserved: PostgreSQL keeps names that begin with pg_")
        if not _SCHEMA.fullmatch(self.schema):
            raise InvalidSettings(
                f"schema {self.schema!r} must match {_SCHEMA.pattern}: lower case, at most 50 characters"
            )
        if self.check_timeout > self.check_time_limit:
            raise InvalidSettings(
                f"check_timeout = {self.check_timeout!r} s is longer than a pass may take (check_time_limit = "
                f"{self.check_time_limit!r} s); set check_time_limit to at least {self.check_timeout!r}"
            )
        horizon = sum(self.retry_delays) * (1 + self.retry_jitter)
        if self.inbox_retention < self.retention + horizon:
            raise InvalidSettings(
                f"inbox_retention = {self.inbox_retention:.0f} s is shorter than retention ({self.retention:.0f} s) "
                f"plus all retries ({horizon:.0f} s): the inbox would forget messages that can still come again; "
                f"set inbox_retention to at least {self.retention + horizon:.0f}"
            )

    def _check_ranges(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise InvalidSettings(f"{name} = {getattr(self, name)!r} must be greater than 0")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise InvalidSettings(f"{name} = {getattr(self, name)!r} must not be negative")
        for name, most in _AT_MOST.items():
            if getattr(self, name) > most:
                raise InvalidSettings(f"{name} = {getattr(self, name)} is more than {most}")
        if not 0 <= self.retry_jitter < 1:
            raise InvalidSettings(f"retry_jitter = {self.retry_jitter!r} must be in [0, 1)")
        if any(delay < 0 for delay in self.retry_delays):
            raise InvalidSettings(f"retry_delays has a negative delay: {self.retry_delays!r}")

    def _check_types(self) -> None:
        if not isinstance(self.retry_delays, list | tuple) or not all(map(_is_number, self.retry_delays)):
            raise InvalidSettings(f"retry_delays = {self.retry_delays!r} must be a tuple of seconds")
        # Frozen and hashable also for callers who give a list.
        object.__setattr__(self, "retry_delays", tuple(self.retry_delays))
        for f in fields(self):
            value, kind = getattr(self, f.name), str(f.type)
            fits = {"int": type(value) is int, "float": _is_number(value), "bool": type(value) is bool}
            if not fits.get(kind, kind != "str" or isinstance(value, str)):
                raise InvalidSettings(f"{f.name} = {value!r} must be {'a finite number' if kind == 'float' else kind}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **overrides: Any) -> Settings:
        """Return settings from variables such as ``OUTBOX_SCHEMA`` or ``OUTBOX_RETENTION`` (seconds).

        ``OUTBOX_RETRY_DELAYS`` is a comma-separated list of seconds.

        Raises:
            InvalidSettings: a variable that can't be read; names it and its value.
        """
        values: dict[str, Any] = {}
        hints = get_type_hints(cls)
        for f in fields(cls):
            text = environ.get(f"OUTBOX_{f.name.upper()}")
            if text is None:
                continue
            try:
                values[f.name] = _read(text, hints[f.name])
            except ValueError:
                kind = getattr(hints[f.name], "__name__", hints[f.name])
                raise InvalidSettings(f"OUTBOX_{f.name.upper()}={text!r} can't be read as {kind}") from None
        return cls(**{**values, **overrides})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read(text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in {"1", "0", "true", "false", "yes", "no", "on", "off"}:
            raise ValueError(text)
        return text.lower() in {"1", "true", "yes", "on"}
    if kind in {int, float, str}:
        return kind(text)
    return tuple(float(part) for part in text.split(",") if part.strip())
