"""Kills processes at random moments, while there is work for them to leave undone."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from .staff import Employee, Staff


class Monkey:
    """Kills a number of processes, spread over the run.

    The orders are cut into one step more than there are kills. Each kill falls at a random point of its step,
    and hits a random process. So that there is work left for every kill, the tellers have leave to be one step
    ahead of the monkey, no further; without kills they have leave to do all at once.
    """

    def __init__(self, staff: Staff, tellers: Mapping[Employee, int], kills: int, seed: int) -> None:
        self._staff = staff
        self._tellers = tellers
        self._kills = kills
        self._made = 0
        self._dice = random.Random(seed)
        self._aim()

    @property
    def content(self) -> bool:
        """Were all kills made?"""
        return self._made >= self._kills

    def act(self, settled: int) -> None:
        """Kill a process if the time has come; ``settled`` is the number of orders that are done with."""
        victims = [employee for employee in self._staff.employees if employee.ready and employee.running]
        if self.content or settled < self._moment or not victims:
            return
        if self._staff.kill(self._dice.choice(victims)):
            self._made += 1
            self._aim()

    def _aim(self) -> None:
        begin, end = self._orders_until(self._made), self._orders_until(self._made + 1)
        self._moment = begin + self._dice.random() * (end - begin)
        for teller, orders in self._tellers.items():
            teller.allow(self._part(orders, self._made + 2))

    def _orders_until(self, step: int) -> int:
        return sum(self._part(orders, step) for orders in self._tellers.values())

    def _part(self, orders: int, step: int) -> int:
        return min(orders, math.ceil(orders * step / (self._kills + 1)))
