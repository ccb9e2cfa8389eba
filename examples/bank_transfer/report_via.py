"""What the report tells of a broker, or of webhooks, between the banks."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from .exchange import Carried
from .options import Via

_TITLES = {Via.WEBHOOK: "The webhooks", Via.ROCKETMQ: "RocketMQ's clients"}


def as_facts(carried: Carried, messages: int) -> dict[str, Any]:
    """Return what went between the banks, which sent so many messages, for the JSON report."""
    return {
        "kind": carried.kind,
        "messages": messages,
        "published": carried.published,
        "published_again": carried.published - messages,
        "taken": carried.taken,
        "known_already": carried.taken - messages,
        "cuts": carried.cuts,
        "dropped_answers": carried.dropped,
    }


def table(carried: Carried, messages: int) -> Table:
    """Return the table of what went between the banks."""
    title = _TITLES.get(carried.kind, f"The broker: {carried.kind}")
    shown = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    shown.add_column(justify="right", style="bold")
    shown.add_column()
    shown.add_column(style="dim")
    stored = "messages that the broker has" if carried.kind.has_broker else "calls that the other bank took"
    rows = [
        (messages, "messages", "transfers of bank A, and the answers of bank B"),
        (carried.published, "published", f"{stored}, {carried.published - messages:,} of them a repetition"),
        (carried.taken, "taken in", f"{carried.taken - messages:,} of them again: the other bank knew the message"),
        (carried.cuts, "cuts", "connections that the proxy cut, behind what it had passed on"),
        (carried.dropped, "dropped", "connections in which the proxy kept back what was answered"),
    ]
    for count, what, more in rows:
        shown.add_row(f"{count:,}", what, more)
    return shown
