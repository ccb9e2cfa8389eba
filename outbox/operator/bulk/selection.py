"""What was asked for, checked; and what there is of it, counted."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.database.execute import Row
from outbox.errors import BulkJobTooLarge, InvalidRequest
from outbox.operator.acts import UNCONSUMED, UNKNOWN, check_group
from outbox.operator.model import MAX_IDS, MAX_ITEMS, Action, HalfFilter, InboxFilter, MessageFilter, Selector, Target

_HALF_ACTS = frozenset({Action.CHECK, Action.RESET, Action.COMMIT, Action.ROLLBACK})


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be acted on, and how: the part of an order that doesn't depend on what is found."""

    action: Action
    selector: Selector
    options: Mapping[str, Any]

    @property
    def by_name(self) -> bool:
        """Are the messages named one by one?"""
        return self.selector.targets is not None

    @property
    def wanted(self) -> MessageFilter | InboxFilter | HalfFilter | None:
        """The filter, if there is one."""
        return self.selector.messages or self.selector.inbox or self.selector.halves

    @property
    def across(self) -> bool:
        """Are messages of inboxes to be acted on at their producer's?"""
        return self.selector.inbox is not None and self.action.part == "producer"

    @property
    def by_ids(self) -> bool:
        """Has a filter to be turned into ids first? Where the databases that it needs aren't all in one place."""
        return self.across or (self.action is Action.COMPENSATE and self.selector.messages is not None)

    @property
    def context(self) -> object:
        """What a token is bound to."""
        return ("bulk_job", self.action, self.selector, sorted(self.options.items()))

    def summary_of(self, rows: list[Row], edge: UUID | dt.datetime | None = None) -> Summary:
        """Return what the rows of `choose_sql.summary` say; ``edge``: if it is not for them to say.

        Raises:
            BulkJobTooLarge: too many are matched.
        """
        own = max((row[4 if self.selector.inbox is not None else 3] for row in rows), default=None)
        summary = Summary([Kept.of(row) for row in rows], own if edge is None else edge)
        if summary.matched > MAX_ITEMS:
            raise BulkJobTooLarge(f"more than {MAX_ITEMS} messages are matched; narrow the filter, such as by time")
        return summary

    def check(self) -> None:
        """See that the selector fits the action.

        Raises:
            InvalidRequest: it doesn't, or isn't exactly one.
            BulkJobTooLarge: too many targets.
        """
        selector = self.selector
        given = [kind for kind in ("targets", "messages", "inbox", "halves") if getattr(selector, kind) is not None]
        if len(given) != 1:
            raise InvalidRequest(f"select by exactly one of targets, messages, inbox, halves, not {given}", "selector")
        if selector.targets is not None:
            self._check_targets(selector.targets)
        fits = {"targets", "inbox"} if self.action.part == "consumer" else {"targets", "messages", "inbox"}
        if self.action in _HALF_ACTS:
            fits = {"targets", "messages", "halves"}
        if not fits.issuperset(given):
            raise InvalidRequest(
                f"{self.action} can't be done by {given[0]}; select by {' or '.join(sorted(fits))}", "selector"
            )
        if selector.messages is not None and selector.messages.body is not None:
            raise InvalidRequest("a bulk job can't select by what is in the bodies; name the messages", field="body")

    def _check_targets(self, targets: tuple[Target, ...]) -> None:
        if not targets:
            raise InvalidRequest("no message is named", field="selector")
        if len(targets) > MAX_IDS:
            raise BulkJobTooLarge(f"{len(targets)} messages are named; at most {MAX_IDS} can be, or use a filter")
        for target in targets:
            check_group(self.action, target)


@dataclass(frozen=True, slots=True)
class Kept:
    """How many of what is matched are in one state, and what they have in common (None: nothing)."""

    state: str
    count: int
    hash: str
    group: str | None
    topic: str | None
    kind: str | None
    sample: list[Target]

    @classmethod
    def of(cls, row: Row) -> Kept:
        """Return what a row of `choose_sql.summary` says."""
        state, count, hashed, _, _, *common, ids, groups = row
        least_greatest = zip(common[::2], common[1::2], strict=True)
        group, topic, kind = (low if low == high and low else None for low, high in least_greatest)
        return cls(state, count, hashed, group, topic, kind, [Target(*pair) for pair in zip(ids, groups, strict=True)])


@dataclass(frozen=True, slots=True)
class Summary:
    """What a query has matched; ``edge`` bounds the same query to what there was then."""

    kept: list[Kept]
    edge: UUID | dt.datetime | None

    @property
    def matched(self) -> int:
        """How many there are."""
        return sum(each.count for each in self.kept)

    @property
    def known(self) -> bool:
        """Is there anything, beside names of what isn't there?"""
        return any(each.state not in {UNKNOWN, UNCONSUMED} for each in self.kept)

    def able(self, states: frozenset[str]) -> list[Kept]:
        """Return those that can be acted on."""
        return [each for each in self.kept if each.state in states]

    def digest(self, states: frozenset[str]) -> list[list[Any]]:
        """Return what is different when what can be acted on is different."""
        return sorted([each.state, each.count, each.hash] for each in self.able(states))
