"""Acts of operators: shown first, asked about, done to one message at once, or to many as an operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.admin.model import Action, Actor, Preview, Selector, Target
from outbox.cli import running
from outbox.cli.arguments import can_ask, make_sure, named, user_here
from outbox.cli.exits import Code, Failure
from outbox.cli.lists import at_least
from outbox.cli.output import Output, print_json, print_table, say, table

if TYPE_CHECKING:
    from outbox.admin.service import Admin
    from outbox.cli.options import Doing, Where


@dataclass(frozen=True, slots=True)
class Order:
    """What to do to which messages, how fast, and whether to wait until it is done."""

    action: Action
    selector: Selector
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float | None = None
    wait: bool = True

    @property
    def single(self) -> Target | None:
        """The message, if it is one that is acted on at once."""
        targets = self.selector.targets or ()
        return targets[0] if len(targets) == 1 and self.action is not Action.ROLLBACK else None


def actor_of(given: str | None) -> Actor:
    """Return who acts, by the option, else whose process this is.

    Raises:
        Failure: the option is empty.
    """
    name = user_here() if given is None else given.strip()
    if not name:
        raise Failure("--actor is empty: the audit must tell who did it", Code.USAGE)
    return Actor(name, {"via": "cli"})


def carry_out(admin: Admin, where: Where, order: Order, doing: Doing) -> None:
    """Show what is to be done, ask, do it, and tell what came of it.

    Raises:
        Failure: refused, or not all of it was done.
    """
    from outbox.admin.doing import NEED_REASON  # noqa: PLC0415 - what the lists needn't import

    actor = actor_of(doing.actor)
    action, single = order.action, order.single
    refusal = f"nothing was done ({action})"
    if not doing.dry_run:
        if not doing.reason.strip() and (single is None or action in NEED_REASON):
            raise Failure(f"give --reason: the audit must tell why ({action})", Code.USAGE)
        can_ask(refusal, yes=doing.yes)
    if order.selector.targets == ():
        say("nothing fits: nothing to do")
        return
    if doing.dry_run or not doing.yes or single is None:
        preview = admin.preview(action, order.selector, database=where.only, options=order.options)
        if doing.dry_run:
            print_preview(preview, doing.output)
            return
        if single is None and not preview.eligible:
            _explain(preview)
            return
        tell_preview(preview)
        make_sure(f"{capitalized(preview.described)}?", refusal, yes=doing.yes)
    if single is not None:
        outcome = admin.act(
            action,
            single,
            actor=actor,
            reason=doing.reason.strip(),
            options=order.options,
            database=where.only,
        )
        say(outcome)
        if doing.output is Output.JSON:
            print_json({"action": action, **dataclasses.asdict(single), "outcome": outcome})
        return
    operation = admin.start(
        action,
        order.selector,
        actor=actor,
        reason=doing.reason.strip(),
        token=preview.token,
        database=where.only,
        options=order.options,
        rate=order.rate,
    )
    running.see_through(admin, where, operation, doing.output, wait=order.wait, here=action is not Action.ROLLBACK)


def print_preview(preview: Preview, output: Output) -> None:
    """Print what would be done."""
    if output is Output.JSON:
        print_json(dataclasses.asdict(preview))
        return
    rows = [
        ("would", preview.described),
        ("in database", preview.database),
        ("matched", at_least(preview.matched)),
        ("eligible", preview.eligible),
        *((f"not: {why}", count) for why, count in preview.ineligible.items()),
        *(("such as" if not number else "", named(target)) for number, target in enumerate(preview.sample)),
    ]
    print_table(table(("dry run", ""), rows))


def tell_preview(preview: Preview) -> None:
    """Tell on stderr what is about to be done."""
    say(f"{preview.described}, in database {preview.database}")
    for why, count in preview.ineligible.items():
        say(f"  not {count}: {why}")
    if preview.eligible > 1:
        say(f"  such as {', '.join(named(target) for target in preview.sample[:3])}")


def _explain(preview: Preview) -> None:
    if not preview.matched.value:
        say("nothing fits: nothing to do")
        return
    reasons = "; ".join(f"{count}: {why}" for why, count in preview.ineligible.items())
    raise Failure(
        f"{preview.action}: nothing can be done to {counted(preview.matched.value)}: {reasons}", Code.CONFLICT
    )


def counted(count: int) -> str:
    """Return how many messages, in words."""
    return f"{count} message{'' if count == 1 else 's'}"


def capitalized(text: str) -> str:
    """Return a text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]
