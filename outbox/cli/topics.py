"""``outbox topics``: what an application declares of its topics.

And the acts on a topic as a whole: its dispatch is paused and resumed, and one that is gone is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from outbox.cli.database import DatabasesOptions
from outbox.cli.exits import Code, Failure
from outbox.cli.options import ActorOptions, AppOption, DecidedOptions, act_after_preview, command, gathered, help_of
from outbox.cli.output import (
    ListForm,
    ListFormOption,
    Output,
    OutputOption,
    RowShape,
    facts_table,
    first_line,
    print_as,
    table,
)
from outbox.cli.processes import load_quietly
from outbox.message.topic import Topic
from outbox.operator.acts import DELETE_TOPIC, PAUSE_TOPIC, RESUME_TOPIC
from outbox.operator.topic_control import TopicPause

topics_app: typer.Typer = typer.Typer(
    name="topics",
    help="Topics as your application declares them: models and versions.\n\n"
    "No database is needed but to pause the dispatch of a topic, and to delete one that is gone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@topics_app.command("list")
def show_topics(app: AppOption = None, output: OutputOption = Output.TABLE) -> None:
    """List the declared topics, with model, version, and the versions that can be read.

    \b
    Example:
      outbox topics list --app shop.messages:outbox
    """
    topics = _declared(app)
    rows = [
        {"topic": name, "model": topic.model_name, "version": topic.version, "reads_since": _reads_since(topic)}
        for name, topic in sorted(topics.items())
    ]
    columns = ("topic", "model", "version>", "reads since>")
    print_as(output, rows, table(columns, [tuple(row.values()) for row in rows]))


# --- a topic as a whole, in its producer's database ------------------------------------------------------------------

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]

_PAUSES = RowShape(
    TopicPause,
    "topic held> paused=paused_at by=paused_by because=pause_reason resumed=resumed_at",
    {"because": lambda row: first_line(row.pause_reason)},
    lambda row: row.topic,
)


@command(topics_app, "paused")
def list_pauses(databases: DatabasesOptions, form: ListFormOption = ListForm.TABLE) -> None:
    """List the topics whose dispatch is paused, and how many messages each holds.

    \b
    Example:
      outbox topics paused
    """
    databases.show(lambda operator: operator.topic_pauses(databases.only), _PAUSES, form)


@gathered
def pause(
    topic: TopicArgument,
    databases: DatabasesOptions,
    decided: DecidedOptions,
    create: Annotated[bool, typer.Option("--create", help="Also a topic that has no message so far.")] = False,
) -> None:
    """Pause a topic."""
    facts: dict[str, Any] = {"by": decided.by, "why": decided.reason, "database": databases.only, "create": create}
    decided.perform(PAUSE_TOPIC, databases, lambda operator: operator.pause_topic(topic, **facts))


@gathered
def resume(topic: TopicArgument, databases: DatabasesOptions, decided: DecidedOptions) -> None:
    """Resume a topic."""
    facts: dict[str, Any] = {"by": decided.by, "why": decided.reason, "database": databases.only}
    decided.perform(RESUME_TOPIC, databases, lambda operator: operator.resume_topic(topic, **facts))


topics_app.command("pause", help=help_of(PAUSE_TOPIC, "topics pause orders"))(pause)
topics_app.command("resume", help=help_of(RESUME_TOPIC, "topics resume orders"))(resume)


@gathered
def delete(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic, as `outbox stats` names it.")],
    databases: DatabasesOptions,
    acting: ActorOptions,
) -> None:
    """Delete a topic."""
    with databases.opened() as operator:
        preview = operator.preview_delete_topic(topic, database=databases.only)
        facts = {
            "queues": preview.queues,
            "last messages": preview.last_messages,
            "groups": ", ".join(f"{group} ({database})" for group, database in preview.groups) or "none",
            "workers": ", ".join(preview.workers) or "none",
            "left": "; ".join(preview.living) or "nothing",
        }
        do = partial(operator.delete_topic, topic, by=acting.by, why=acting.reason, database=databases.only)
        act_after_preview(DELETE_TOPIC, acting, f"topic {topic}", preview, [facts_table(f"Topic {topic}", facts)], do)


topics_app.command("delete", help=help_of(DELETE_TOPIC, "topics delete order-created"))(delete)


# --- what an application declares ------------------------------------------------------------------------------------


def _declared(path: str | None) -> Mapping[str, Topic[Any]]:
    if path is None:
        raise Failure("say where your Outbox is: --app MODULE:OBJECT (or OUTBOX_APP)", Code.USAGE)
    return load_quietly(path).topics


def _reads_since(topic: Topic[Any]) -> int:
    missing = topic.missing_upcasters()
    return missing[-1] + 1 if missing else 1
