"""Settings: one frozen object, from code or from ``OUTBOX_*`` variables, refused when they contradict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outbox.errors import InvalidSettings
from outbox.reader import Reader, Seconds, environment, option

#: RocketMQ's retry table (retries 1-16), in seconds: 10 s, 30 s, 1 m ... 2 h.
RETRY_DELAYS = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)

#: RocketMQ's table of delay levels (``MessageStoreConfig.messageDelayLevel``), in seconds: level 1 is 1 s, 18 is 2 h.
DELAY_LEVELS = (1, 5, *RETRY_DELAYS)

_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,49}", re.ASCII)
_HOUR = 3600.0
_CENTURY = 100 * 366 * 86400 - 1

#: Variables that begin like those of settings, and are something else's.
_OTHERS = (
    *("OUTBOX_DATABASE_URL", "OUTBOX_PRODUCER_URL", "OUTBOX_CONSUMER_URL", "OUTBOX_RECORD_URL"),
    *("OUTBOX_APP", "OUTBOX_PROCESSES"),
    *("OUTBOX_DATABASE_URL_FILE", "OUTBOX_PRODUCER_URL_FILE", "OUTBOX_CONSUMER_URL_FILE", "OUTBOX_RECORD_URL_FILE"),
    *("OUTBOX_PG_BIN", "OUTBOX_CONSOLE_*", "OUTBOX_DEMO_*", "OUTBOX_TEST_*", "OUTBOX_BENCH_*"),
    # Kubernetes gives them to a pod for each service whose name begins so.
    *("OUTBOX_*SERVICE_HOST", "OUTBOX_*SERVICE_PORT*", "OUTBOX_PORT", "OUTBOX_*_PORT", "OUTBOX_*PORT_*_TCP*"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one `Outbox`; durations are seconds.

    ``retention`` keeps decided halves, their ops and messages, ``undelivered_retention`` those messages that a known
    group has yet to consume. ``inbox_retention`` keeps inbox rows; it must outlive ``retention`` by the retry horizon,
    or a message could be delivered again to an inbox that has forgotten it. (A row outlives its own message in any
    case.) ``record_retention`` keeps what reconciliations found, failed attempts, ended sagas, and inbox rows
    of earlier passages.
    ``max_starts`` is how often a message may be started without ever finishing (the process died) before it is parked.

    Of the check, with RocketMQ's defaults (``BrokerConfig``): ``immunity`` (transactionTimeOut) is how long a half is
    left alone, ``check_interval`` (transactionCheckInterval) the pause between two checks, ``max_checks``
    (transactionCheckMax) how often a checker is asked before the half is parked, ``check_time_limit``
    (MAX_PROCESS_TIME_LIMIT) how long a pass begins new checks, ``checks_in_flight`` (the check's thread pool) how many
    checkers run at once in a worker. ``check_timeout`` is how long a checker may take, ``check_batch`` how many fences
    are tried in one transaction.

    Of deliveries: what a group has lost, though it read past it, is sent again after ``confirm_grace``, and again each
    time when that is over, ``confirm_resends`` times in all.

    ``max_undecided`` and ``max_undispatched`` make producers of a topic fail with `OutboxBusy` while so many of its
    halves wait for a decision, or so many of its committed ops for dispatch; 0 is no limit.

    Raises:
        InvalidSettings: a value out of range, or two that contradict each other.
    """

    # Sending
    queues: int = option(8, "Queues of a topic that is used for the first time.", least=1, most=4096, page="sending")
    max_body_bytes: int = option(4 * 1024 * 1024, "The largest body of a message.", above=0, page="sending")
    compress_above: int = option(
        0, "Bytes above which a body is stored compressed; 0 is never.", least=0, page="sending"
    )
    max_transaction_bytes: int = option(
        256 * 1024 * 1024,
        "The largest sum of the bodies that one transaction sends.",
        above=0,
        most=768 * 1024 * 1024,  # the server takes less than 1 GiB in one message
        page="sending",
    )
    delay_levels: tuple[Seconds, ...] = option(
        DELAY_LEVELS,
        "The delays of delay_level 1, 2 and so on; a level above the last is the last.",
        most=_CENTURY,
        page="sending",
    )
    max_undecided: int = option(
        0,
        "Undecided halves of a topic from which on its producers get OutboxBusy; 0 is no limit.",
        least=0,
        page="sending",
    )
    max_undispatched: int = option(
        0, "Undispatched messages of a topic from which on its producers get OutboxBusy.", least=0, page="sending"
    )

    # Checking; the bounds are what the columns hold, and what the server takes as a time.
    immunity: Seconds = option(
        6.0, "How long a half is left alone before it is an orphan.", least=0, most=_CENTURY, page="checking"
    )
    check_interval: Seconds = option(30.0, "The pause between two checks.", above=0, most=_CENTURY, page="checking")
    max_checks: int = option(
        15, "How often a checker is asked before the half is parked.", least=1, most=2**31 - 1, page="checking"
    )
    check_timeout: Seconds = option(10.0, "How long a checker may take.", above=0, page="checking")
    check_time_limit: Seconds = option(
        60.0, "How long a check pass begins new checks.", above=0, most=86400, page="checking"
    )
    checks_in_flight: int = option(5, "Checkers that run at once in one worker.", least=1, most=1000, page="checking")
    check_batch: int = option(200, "Fences that one transaction tries.", least=1, most=1000, page="checking")

    # Consuming
    read_ahead: int = option(500, "Messages that a consumer reads ahead.", above=0, page="consuming")
    read_ahead_bytes: int = option(16 * 1024 * 1024, "Bytes that a consumer reads ahead.", above=0, page="consuming")
    retry_delays: tuple[Seconds, ...] = option(
        RETRY_DELAYS,
        "The pauses before the retries of a failed message; their number is that of the retries.",
        page="consuming",
    )
    retry_jitter: float = option(
        0.1, "The part of a pause that is added at random at most.", least=0, below=1, page="consuming"
    )
    max_starts: int = option(
        10,
        "How often a message may be started without ever finishing before it is parked.",
        least=1,
        most=2**15 - 1,
        page="consuming",
    )

    # Delivering
    confirm_interval: Seconds = option(
        60.0, "The pause between two passes that ask the consumers.", above=0, most=86400, page="delivering"
    )
    confirm_grace: Seconds = option(
        60.0, "How long a message is left alone before a consumer is asked.", least=0, most=86400, page="delivering"
    )
    confirm_resends: int = option(
        5, "How often a message that a group has lost is sent again.", least=0, most=1000, page="delivering"
    )
    confirm_batch: int = option(
        2_000, "Messages that a consumer is asked about at once.", least=1, most=10_000, page="delivering"
    )
    compensate_parked: int = option(
        1_000,
        "Compensations of parked messages that are ordered without an operator in an hour; 0 switches that off.",
        least=0,
        page="delivering",
    )

    # Three times as long as a checker: it writes, and may wait for the locks of others.
    compensation_timeout: Seconds = option(
        30.0, "How long a compensation may take.", above=0, most=86400, page="delivering"
    )
    compensation_attempts: int = option(
        5,
        "How often a compensation is tried, also where its worker died over it, before it waits for an operator.",
        least=1,
        most=2**15 - 1,
        page="delivering",
    )

    # Deploying
    schema: str = option("outbox", "The schema of the tables.", page="deploying")
    retention: Seconds = option(
        72 * _HOUR, "How long decided halves, ops and messages are kept.", above=0, page="deploying"
    )
    undelivered_retention: Seconds = option(
        0.0,
        "How long messages are kept that a known group has yet to consume; 0: no longer than others.",
        least=0,
        page="deploying",
    )
    inbox_retention: Seconds = option(
        2 * 72 * _HOUR,
        "How long inbox rows are kept; longer than retention and all retries together.",
        above=0,
        page="deploying",
    )
    record_retention: Seconds = option(
        90 * 24 * _HOUR,
        "How long records of reconciliations and of failed attempts are kept.",
        above=0,
        page="deploying",
    )
    dispatch_batch: int = option(10_000, "Messages of one dispatch transaction.", above=0, page="deploying")
    prune_batch: int = option(1_000, "Rows of one prune transaction.", above=0, page="deploying")
    idle_wait: Seconds = option(
        0.2, "The pause of dispatch and consumers with nothing to do.", above=0, page="deploying"
    )
    retry_interval: Seconds = option(1.0, "The pause between two passes for due retries.", above=0, page="deploying")
    release_interval: Seconds = option(
        0.5, "The pause between two passes for due scheduled messages.", above=0, page="deploying"
    )
    prune_interval: Seconds = option(60.0, "The pause between two prune passes.", above=0, page="deploying")
    drain_timeout: Seconds = option(30.0, "How long a worker that stops waits for its handlers.", page="deploying")
    hang_timeout: Seconds = option(
        60.0,
        "How long one of several worker processes may hang before it ends, and another one starts.",
        least=2,
        page="deploying",
    )
    reconnect_cap: Seconds = option(
        15.0, "The longest pause between two attempts to connect.", above=0, page="deploying"
    )
    listen: bool = option(True, "Wake up by LISTEN as well as by the clock.", page="deploying")

    def __post_init__(self) -> None:
        Reader().check(self)
        if self.schema.startswith("pg_"):
            raise InvalidSettings(f"schema {self.schema!r} is reserved: PostgreSQL keeps names that begin with pg_")
        if not _SCHEMA.fullmatch(self.schema):
            raise InvalidSettings(
                f"schema {self.schema!r} must match {_SCHEMA.pattern}: lower case, at most 50 characters"
            )
        if not self.delay_levels:
            raise InvalidSettings("delay_levels is empty; give the delay of level 1 at least, or leave it out")
        if self.max_body_bytes > self.max_transaction_bytes:
            raise InvalidSettings(
                f"max_body_bytes = {self.max_body_bytes} is more than a transaction may send (max_transaction_bytes = "
                f"{self.max_transaction_bytes}); set it to at most that"
            )
        if self.check_timeout > self.check_time_limit:
            raise InvalidSettings(
                f"check_timeout = {self.check_timeout!r} s is longer than a pass may take (check_time_limit = "
                f"{self.check_time_limit!r} s); set check_time_limit to at least {self.check_timeout!r}"
            )
        if 0 < self.undelivered_retention < self.retention:
            raise InvalidSettings(
                f"undelivered_retention = {self.undelivered_retention:.0f} s is shorter than retention "
                f"({self.retention:.0f} s): what no group has consumed would be kept for less than what all have; "
                f"set it to at least {self.retention:.0f}, or to 0 (no longer than others)"
            )
        horizon = sum(self.retry_delays) * (1 + self.retry_jitter)
        if self.inbox_retention < self.retention + horizon:
            raise InvalidSettings(
                f"inbox_retention = {self.inbox_retention:.0f} s is shorter than retention ({self.retention:.0f} s) "
                f"plus all retries ({horizon:.0f} s): the inbox would forget messages that can still come again; "
                f"set inbox_retention to at least {self.retention + horizon:.0f}"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Return settings from variables such as ``OUTBOX_SCHEMA``, or ``OUTBOX_RETENTION`` (``259200`` or ``72h``).

        ``environ`` is that of the process unless given; ``overrides`` that aren't None go before it.
        ``OUTBOX_RETRY_DELAYS`` and ``OUTBOX_DELAY_LEVELS`` are comma-separated lists.

        Raises:
            InvalidSettings: a variable that can't be read, or a misspelt one; names it, its value and the mend.
        """
        known = {name: value for name, value in overrides.items() if value is not None}
        return cls(**environment(cls, "OUTBOX_", environ, _OTHERS) | known)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleServer:
    """How a console of its own is reached: options of `outbox console`, and variables ``OUTBOX_CONSOLE_*``."""

    host: str = option("127.0.0.1", "Where to listen; without a login only on this machine.", metavar="ADDRESS")
    port: int = option(8900, "The port to listen on; 0 takes a free one.", least=0, most=65535, metavar="N")
    read_only: bool = option(False, "Only show; nothing can be changed.")
    env: str | None = option(
        None, "Shown as a badge, such as staging; prod is red.", metavar="NAME", aliases=("environment",)
    )
    allowed_hosts: tuple[str, ...] | None = option(
        None, "A name under which it is reached, beside localhost.", metavar="HOST", aliases=("allow_host",)
    )
    trusted_proxies: tuple[str, ...] = option(
        (), "A proxy or network whose X-Forwarded-* is believed.", metavar="ADDRESS", aliases=("trusted_proxy",)
    )
    root_path: str = option(
        "", "The prefix that a proxy takes off, such as /outbox.", metavar="PATH", parse=lambda text: text.rstrip("/")
    )
