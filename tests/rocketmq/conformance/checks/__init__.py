"""The checks, by what they are about."""

from __future__ import annotations

from tests.rocketmq.conformance.checks import delaying, native, pushing, receiving, sending, starting, transactions
from tests.rocketmq.conformance.suite import CHECKS

__all__ = ["CHECKS", "delaying", "native", "pushing", "receiving", "sending", "starting", "transactions"]
