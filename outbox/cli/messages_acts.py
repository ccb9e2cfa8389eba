"""``outbox messages resend``, ``recall`` and ``rollback``: one message, or many as an operation."""

from __future__ import annotations

from typing import Annotated

import typer

from outbox.admin.model import Action
from outbox.cli.bulk import Order, carry_out
from outbox.cli.choosing import IdsArgument, MessageChoice, message_targets, selected_messages
from outbox.cli.options import Doing, Many, Where, gathered
from outbox.cli.span import Span
from outbox.messages import MessageStatus


@gathered
def resend(ids: IdsArgument = None, *, where: Where, choice: MessageChoice, many: Many, doing: Doing) -> None:
    """Send messages once more under the same ids.

    A group that has handled a message knows its id, and does nothing; one that has lost it gets it. Only what was
    dispatched can be resent. Several at once, and those picked by options, need a --reason, are shown first and run as
    an operation.

    \b
    Examples:
      outbox messages resend 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11
      outbox messages resend --topic orders --since 2h --dry-run
      outbox messages list --key 42 -o id | outbox messages resend - --reason "mail lost its inbox" --yes
    """
    _act(Action.RESEND, ids or [], where, choice, many, doing, [MessageStatus.DISPATCHED])


@gathered
def recall(ids: IdsArgument = None, *, where: Where, choice: MessageChoice, many: Many, doing: Doing) -> None:
    """Take scheduled messages back before they are due.

    \b
    Examples:
      outbox messages recall 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "the order was cancelled"
      outbox messages recall --topic reminders --all --reason "wrong text" --dry-run
    """
    _act(Action.RECALL, ids or [], where, choice, many, doing, [MessageStatus.SCHEDULED])


@gathered
def rollback(
    ids: IdsArgument = None,
    *,
    where: Where,
    choice: MessageChoice,
    many: Many,
    doing: Doing,
    acknowledge_delivered: Annotated[
        bool,
        typer.Option(
            "--acknowledge-delivered", help="Also where a group has handled the message: its effect there stays."
        ),
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Don't wait for a worker to have done it; print the operation's id.")
    ] = False,
) -> None:
    """Roll back local transactions whose messages must not, or can't, take effect.

    First each group's inbox is fenced, so that the message can't take effect later; then a worker that has the
    function which the service registered for the topic (`@outbox.compensation`) runs it, once per message ever. Where a
    group has handled the message already, that is refused. It is an operation, which this command waits for; Ctrl-C
    ends the waiting, not the operation.

    \b
    Examples:
      outbox messages rollback 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "no such account at bank B"
      outbox messages rollback --topic transfer --where to=B-9999 --reason "no such account" --dry-run
    """
    options = {"acknowledge_delivered": True} if acknowledge_delivered else {}
    _act(Action.ROLLBACK, ids or [], where, choice, many, doing, [], options=options, wait=not no_wait)


def _act(
    action: Action,
    ids: list[str],
    where: Where,
    choice: MessageChoice,
    many: Many,
    doing: Doing,
    statuses: list[MessageStatus],
    *,
    options: dict[str, bool] | None = None,
    wait: bool = True,
) -> None:
    targets = message_targets(ids)
    with where.opened() as admin:
        wanted = choice.wanted(Span.of(admin, choice.since, choice.until), where.only, statuses=statuses)
        selector = selected_messages(admin, targets, wanted, many, narrowed=choice.narrows())
        carry_out(admin, where, Order(action, selector, options or {}, many.rate, wait), doing)
