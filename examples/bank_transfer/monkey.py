"""Kills processes at random moments, while there is work for them to leave undone."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Mapping, Sequence

from .processes import BROKER, BankProcess, Processes, Target

_STALL_SECONDS = 2.5


class Monkey:
    """Kills a number of processes, spread over the run.

    The orders are cut into one step more than there are kills. Each kill falls at a random point of its step,
    and hits a random process, of those kinds that were hit least so far; or the broker. So that there is work left for
    every kill, the tellers have leave to be one step ahead of the monkey, no further; without kills they have leave to
    do all at once.

    Where tellers report their steps, two of three kills are aimed: at a random order of a teller, and at one of
    the ``moments`` in it, which are over within a millisecond or two, so that hardly any kill would find one by chance.
    Now and then a teller isn't killed in such a moment, but stopped for longer than the check waits.
    """

    def __init__(
        self,
        processes: Processes,
        tellers: Mapping[BankProcess, int],
        kills: int,
        seed: int,
        moments: Sequence[str] = (),
    ) -> None:
        self._processes = processes
        self._tellers = tellers
        self._kills = kills
        self._moments = moments
        self._made = 0
        self._dice = random.Random(seed)
        self._targeted: BankProcess | None = None
        self._stopped_at = 0.0
        self._aim()

    @property
    def done(self) -> bool:
        """Were all kills made?"""
        return self._made >= self._kills

    def act(self, settled: int) -> None:
        """Kill a process if the time has come; ``settled`` is the number of orders that are done with."""
        if self.done or self._stalls():
            return
        if (victim := self._victim(settled)) is None:
            return
        if victim == BROKER:
            self._processes.kill_broker()
        elif not isinstance(victim, BankProcess) or not self._processes.kill(victim):
            return
        self._made += 1
        self._aim()

    def _stalls(self) -> bool:
        """Tell whether a teller is stopped; wake it when it is time."""
        targeted = self._targeted
        if targeted is None or not targeted.stalled:
            return False
        self._stopped_at = self._stopped_at or time.monotonic()
        if time.monotonic() - self._stopped_at > _STALL_SECONDS:
            self._processes.wake(targeted)
            self._targeted, self._stopped_at = None, 0.0
        return True

    def _victim(self, settled: int) -> BankProcess | str | None:
        """Return what is to be killed now, if anything is: a process, or the broker."""
        targeted = self._targeted
        if targeted is not None and not targeted.finished:
            # It has leave for the order that it is targeted at. If that was refused, no moment came: then any will do.
            all_done = settled >= self._orders_until(self._made + 2)
            return targeted if targeted.signalled or all_done else None
        at_work, kills = self._processes.at_work, self._processes.kills
        if not at_work or settled < self._moment:
            return None
        fewest = min(kills[role] for role in at_work)
        role = self._dice.choice([each for each in at_work if kills[each] == fewest])
        return self._dice.choice(at_work[role]) if at_work[role] else role

    def _aim(self) -> None:
        begin, end = self._orders_until(self._made), self._orders_until(self._made + 1)
        self._moment = begin + self._dice.random() * (end - begin)
        self._targeted = None if self.done else self._choose_target()
        for teller, orders in self._tellers.items():
            teller.allow(self._part(orders, self._made + 2))

    def _choose_target(self) -> BankProcess | None:
        """Target a teller at an order that it has had no leave for so far."""
        if not self._moments or self._dice.random() < 1 / 3:
            return None
        ahead = {
            teller: range(self._part(orders, self._made + 1) + 1, self._part(orders, self._made + 2) + 1)
            for teller, orders in self._tellers.items()
        }
        tellers = [teller for teller, orders in ahead.items() if orders]
        if not tellers:
            return None
        teller = self._dice.choice(tellers)
        what = signal.SIGSTOP if self._dice.random() < 1 / 5 else signal.SIGKILL
        teller.target = Target(what, self._dice.choice(self._moments), self._dice.choice(ahead[teller]))
        return teller

    def _orders_until(self, step: int) -> int:
        return sum(self._part(orders, step) for orders in self._tellers.values())

    def _part(self, orders: int, step: int) -> int:
        return min(orders, math.ceil(orders * step / (self._kills + 1)))
