"""Which messages to act on: by ids, from stdin, or by a filter; and what an act is, on either side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from outbox.cli.arguments import Many, SinceOption, Span, UntilOption, as_id
from outbox.cli.exits import Code, Failure
from outbox.cli.lists import every
from outbox.operator.model import MAX_IDS, InboxFilter, MessageFilter, Selector, Target
from outbox.operator.old_messages import MessageStatus

if TYPE_CHECKING:
    from outbox.operator.service import Admin

IdsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ID…", help="Message ids; - reads them from stdin, one a line.")
]
TargetsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="GROUP/ID…", help="A group and a message id; - reads them from stdin, one a line."),
]


@dataclass(frozen=True, slots=True)
class MessageChoice:
    """Which messages of the producers."""

    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None
    key: Annotated[str | None, typer.Option(help="Only this key.")] = None
    tag: Annotated[str | None, typer.Option(help="Only this tag.")] = None
    status: Annotated[
        list[MessageStatus] | None, typer.Option(help="Only messages that have come so far; may be given again.")
    ] = None
    producer_group: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this producer group.")] = None
    header: Annotated[str | None, typer.Option(metavar="NAME=TEXT", help="Only with this header.")] = None
    where: Annotated[
        str | None, typer.Option(metavar="PATH=TEXT", help="Only with this in the body, such as order.id=42.")
    ] = None
    since: SinceOption = None
    until: UntilOption = None

    def narrows(self) -> bool:
        """Do these options pick messages?"""
        return self != MessageChoice()

    def wanted(self, span: Span, database: str | None, *, statuses: Sequence[MessageStatus] = ()) -> MessageFilter:
        """Return the filter; of these statuses where none was asked for.

        Raises:
            Failure: a pair that is none.
        """
        return MessageFilter(
            database,
            tuple(status.value for status in self.status or statuses),
            self.topic,
            self.key,
            self.tag,
            self.producer_group,
            span.since,
            span.until,
            _pair("--header", self.header),
            _pair("--where", self.where),
        )


@dataclass(frozen=True, slots=True)
class InboxChoice:
    """Which messages of inboxes."""

    group: Annotated[str | None, typer.Option(metavar="NAME", help="Only this group.")] = None
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None
    message: Annotated[str | None, typer.Option(metavar="ID", help="Only this message.")] = None
    error: Annotated[str | None, typer.Option(metavar="TEXT", help="Only where the last error has this in it.")] = None
    attempts: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only after so many attempts or more.")] = (
        None
    )
    since: SinceOption = None
    until: UntilOption = None

    def narrows(self, targets: Sequence[Target]) -> bool:
        """Do these options pick messages? A group alone may also be that of ids."""
        return (replace(self, group=None) if targets else self) != InboxChoice()

    def wanted(
        self,
        span: Span,
        database: str | None,
        statuses: Sequence[str] = (),
        *,
        discarded: bool | None = None,
        fingerprint: str | None = None,
    ) -> InboxFilter:
        """Return the filter.

        Raises:
            Failure: an id that is none.
        """
        return InboxFilter(
            database,
            tuple(statuses),
            None if fingerprint else self.group,
            self.topic,
            as_id(self.message, "--message") if self.message else None,
            fingerprint,
            self.error,
            self.attempts,
            span.since,
            span.until,
            discarded,
        )


def message_targets(given: Sequence[str]) -> tuple[Target, ...]:
    """Return the messages of these ids, each once; a group before an id (GROUP/ID) doesn't matter.

    Raises:
        Failure: one is none.
    """
    return tuple(dict.fromkeys(Target(as_id(text.rpartition("/")[2])) for text in _words(given)))


def inbox_targets(given: Sequence[str], group: str | None) -> tuple[Target, ...]:
    """Return the messages of these groups, each once; ``group`` is that of the ids without one.

    Raises:
        Failure: one is none, or has no group.
    """
    targets = []
    for text in _words(given):
        own, _, id_ = text.rpartition("/")
        if not (name := own or group):
            raise Failure(f"{text!r} has no group: write GROUP/{text}, or give --group", Code.USAGE)
        targets.append(Target(as_id(id_), name))
    return tuple(targets)


def selected_messages(
    admin: Admin, targets: tuple[Target, ...], wanted: MessageFilter, many: Many, *, narrowed: bool
) -> Selector:
    """Return what was picked: messages by name, all that fit, or the newest few of these.

    Raises:
        Failure: neither names nor a filter, or both; or more than can be named where only the list can tell which fit.
    """
    _one_way(bool(targets), narrowed, many)
    if targets:
        return Selector(targets=targets)
    if many.limit is None and wanted.body is None:
        return Selector(messages=wanted)
    rows = list(every(lambda page: admin.messages(wanted, page), many.limit or MAX_IDS + 1))
    if len(rows) > MAX_IDS:
        raise Failure(
            f"more than {MAX_IDS} messages have this in the body; narrow it down, or give --limit", Code.USAGE
        )
    return Selector(targets=tuple(Target(row.id) for row in rows))


def selected_inbox(
    admin: Admin, targets: tuple[Target, ...], wanted: InboxFilter, many: Many, *, narrowed: bool
) -> Selector:
    """Return what was picked in inboxes, like `selected_messages`; ``narrowed``: by options, beside those ``many``."""
    _one_way(bool(targets), narrowed, many)
    if targets:
        return Selector(targets=targets)
    if many.limit is None:
        return Selector(inbox=wanted)
    rows = every(lambda page: admin.inbox(wanted, page), many.limit)
    return Selector(targets=tuple(Target(row.message_id, row.group) for row in rows))


def _one_way(named: bool, narrowed: bool, many: Many) -> None:
    if named and (narrowed or many.everything or many.limit):
        raise Failure("give ids, or options that pick messages, not both", Code.USAGE)
    if not named and not narrowed and not many.everything:
        raise Failure("say which: give ids, options that pick messages, or --all", Code.USAGE)


def _words(given: Sequence[str]) -> list[str]:
    """Return the words of the command line, each once; those of stdin in place of ``-``."""
    words: list[str] = []
    for text in given:
        words += [line.strip() for line in sys.stdin if line.strip()] if text == "-" else [text]
    return list(dict.fromkeys(words))


def _pair(option: str, text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise Failure(f"{option} {text!r} must be NAME=TEXT", Code.USAGE)
    return name, value
