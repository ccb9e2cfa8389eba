"""Declare the options of the demo."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from outbox.reconcile.job import EngineName

from .message import RICHEST

_DEFAULT_KILLS = 30


class Mode(enum.StrEnum):
    """How the tellers execute orders; see `bank_a`."""

    SEND = "send"
    TWO_PHASE = "two-phase"
    TCC = "tcc"


class Via(enum.StrEnum):
    """What stands between the banks, where bank B can't read bank A's database; see `via`."""

    KAFKA = "kafka"
    RABBITMQ = "rabbitmq"
    NATS = "nats"
    REDIS = "redis"
    WEBHOOK = "webhook"
    ROCKETMQ = "rocketmq"

    @property
    def has_broker(self) -> bool:
        """Is there a server between the banks? Without one, each bank talks to a process of the other."""
        return self not in {Via.WEBHOOK, Via.ROCKETMQ}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Hold the options of a run of the demo.

    ``orders``: a file of payment orders (see `orders`); None generates ``transfers`` of them from ``seed``.
    ``accounts``: a file of the account ids that bank A knows; None: all that the orders name.
    ``opening_balance``: what every account of bank A begins with; None: what covers its orders.
    ``producers``, ``consumers``: numbers of processes of tellers at bank A, and of workers at bank B.
    ``crash``: kill processes at random, and close accounts of bank B in between; ``kills`` says how many (and implies
    ``crash``), by default 30.
    ``via``: bank B has no access to bank A's database, nor bank A to that of bank B: messages go through a real broker
    of this kind, by webhooks, or each bank serves RocketMQ's client of the other. With ``crash`` the broker is killed
    too, and a proxy drops what is answered.
    ``two_phase``: an order begins with a half message. ``tcc``: it is tried, then confirmed or cancelled.
    ``faults``: when the work is done, the tables of both banks are damaged on purpose. ``reconcile``: at the end the
    two are compared, and the damage is repaired; ``engine`` compares, ``report`` is the file for its HTML page.
    ``console``: accounts are closed, and only an operator refunds; when the work is done, the banks stay open,
    with the admin console at ``console_port``.
    ``strict``: refused orders make the exit code 1. ``json``: print one JSON object instead of the tables.

    Raises:
        ValueError: a number out of range, two options that exclude each other, or a report in a folder that isn't
            there; names the option.
    """

    orders: Path | None = None
    accounts: Path | None = None
    opening_balance: Decimal | None = None
    transfers: int = 1000
    producers: int = 2
    consumers: int = 2
    crash: bool = False
    kills: int | None = None
    via: Via | None = None
    two_phase: bool = False
    tcc: bool = False
    faults: bool = False
    reconcile: bool = True
    engine: EngineName = EngineName.AUTO
    report: Path | None = None
    console: bool = False
    console_port: int = 8900
    seed: int = 1
    strict: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        if self.via is not None and self.via not in list(Via):
            raise ValueError(f"via = {self.via} must be one of {', '.join(Via)}")
        object.__setattr__(self, "via", self.via and Via(self.via))
        if self.via and (self.faults or self.console):
            what = "faults" if self.faults else "console"
            raise ValueError(f"{what} needs two banks that know each other's databases; leave out {what}, or via")
        for name, value, most in (
            ("transfers", self.transfers, 10_000_000),
            ("producers", self.producers, 64),
            ("consumers", self.consumers, 64),
            ("kills", self.kills, 100_000),
            ("console_port", self.console_port, 65_535),
        ):
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} = {value} must be between 1 and {most:,}")
        if self.two_phase and self.tcc:
            raise ValueError("two_phase and tcc are two modes of executing an order; choose one of them")
        if not self.reconcile and (self.faults or self.report):
            raise ValueError("faults and report need the reconciliation; leave out no_reconcile")
        if self.report and not self.report.absolute().parent.is_dir():
            raise ValueError(f"report = {self.report} is in a folder that isn't there; make the folder first")
        balance = self.opening_balance
        if balance is not None and not (
            balance.is_finite() and 0 <= balance <= RICHEST and balance == round(balance, 2)
        ):
            raise ValueError(f"opening_balance = {balance} must be between 0 and {RICHEST:,}, with at most 2 decimals")

    @property
    def mode(self) -> Mode:
        """How the tellers are to execute orders."""
        if self.two_phase:
            return Mode.TWO_PHASE
        return Mode.TCC if self.tcc else Mode.SEND

    @property
    def planned_kills(self) -> int:
        """How many kills the run will see."""
        return self.kills or (_DEFAULT_KILLS if self.crash else 0)

    @property
    def closes_accounts(self) -> bool:
        """Do customers of bank B close their accounts while the banks work?"""
        return self.planned_kills > 0 or self.console
