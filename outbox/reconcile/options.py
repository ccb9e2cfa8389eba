"""What a reconciliation is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outbox.errors import InvalidSettings
from outbox.reconcile.measure.declaration import Measure
from outbox.reconcile.model import Access, Action, EngineName, Outcome, Pair, Tier, Window

#: What can be done about each kind; the first is what is done unless a policy says otherwise.
POSSIBLE: Mapping[Outcome, tuple[Action, ...]] = {
    Outcome.CONSUMED_THOUGH_ROLLED_BACK: (Action.ALERT,),
    Outcome.DUPLICATE_EFFECT: (Action.ALERT,),
    Outcome.PHANTOM: (Action.ALERT, Action.PARK),
    Outcome.DIGEST_MISMATCH: (Action.ALERT, Action.PARK),
    Outcome.NO_EFFECT: (Action.ALERT,),
    Outcome.UNRECORDED: (Action.SYNC_STATUS, Action.ALERT),
    Outcome.STATUS_MISMATCH: (Action.SYNC_STATUS, Action.ALERT),
    Outcome.UNCOMPENSATED: (Action.ALERT,),
    Outcome.UNDISPATCHED: (Action.DISPATCH, Action.ALERT),
    Outcome.RESEND_EXHAUSTED: (Action.ALERT,),
    Outcome.MISSING: (Action.RESEND, Action.ALERT),
    Outcome.UNCONSUMED: (Action.ALERT,),
    Outcome.PARKED: (Action.ALERT, Action.RETRY),
    Outcome.FAILED: (Action.ALERT, Action.PARK),
    Outcome.UNDECIDED: (Action.ALERT, Action.CHECK),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """What is done about each kind; kinds that aren't named have the first action of `POSSIBLE`.

    ``max_resends``: a message that was resent so often and is missing still is `RESEND_EXHAUSTED`.

    Raises:
        InvalidSettings: an action that makes no sense for its kind; names those that do.
    """

    actions: Mapping[Outcome, Action] = field(default_factory=dict)
    max_resends: int = 3

    def __post_init__(self) -> None:
        if self.max_resends < 0:
            raise InvalidSettings(f"max_resends = {self.max_resends} must not be negative")
        for kind, action in self.actions.items():
            if kind not in POSSIBLE:
                raise InvalidSettings(f"{kind.label} is no difference: there is nothing to do about it")
            if action not in POSSIBLE[kind]:
                raise InvalidSettings(
                    f"{action.value!r} can't mend {kind.label}; choose one of "
                    f"{', '.join(possible.value for possible in POSSIBLE[kind])}"
                )

    def action(self, kind: Outcome) -> Action:
        """Return what is done about a kind."""
        return self.actions.get(kind, POSSIBLE[kind][0])


@dataclass(frozen=True, slots=True)
class Spark:
    """Where and how Spark runs; None leaves it to Spark's own configuration.

    ``remote`` is the address of a Spark Connect server (``sc://host:port``). ``jdbc_jar`` makes Spark read with its
    own JDBC source and this driver. ``ui`` opens Spark's web page. ``conf`` goes to the session as it is.
    """

    master: str | None = None
    remote: str | None = field(default=None, repr=False)  # may hold a token
    jdbc_jar: Path | None = None
    ui: bool = False
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Job:
    """A reconciliation: two databases, the pairs to compare, and how.

    ``archives`` are folders of archived messages (`archive`) that stand in for what the producer has pruned.
    ``keep_for`` (seconds) is how long the digest of a range that was in sync is trusted before the range is verified
    anew; 0 trusts none. ``record`` writes runs and findings into the consumer's database. ``apply`` repairs by
    ``policy``; otherwise nothing but the record is written. ``workers`` is how many ranges are compared at once.

    Raises:
        InvalidSettings: no pair, the same pair twice, or a number that makes no sense.
    """

    producer: Access
    consumer: Access
    pairs: tuple[Pair, ...]
    window: Window = field(default_factory=Window)
    tier: Tier = Tier.AUTO
    engine: EngineName = EngineName.AUTO
    archives: tuple[Path, ...] = ()
    measures: tuple[Measure, ...] = ()
    policy: Policy = field(default_factory=Policy)
    apply: bool = False
    record: bool = True
    keep_for: float = 7 * 86400.0
    workers: int = 2
    actor: str = "reconcile"
    spark: Spark = field(default_factory=Spark)

    def __post_init__(self) -> None:
        if not self.pairs:
            raise InvalidSettings("nothing to reconcile: name a topic and a group")
        if len({(pair.topic, pair.group) for pair in self.pairs}) < len(self.pairs):
            raise InvalidSettings("a topic and group is named twice")
        if self.keep_for < 0:
            raise InvalidSettings(f"keep_for = {self.keep_for!r} must not be negative")
        if self.workers < 1:
            raise InvalidSettings(f"workers = {self.workers} must be at least 1")
