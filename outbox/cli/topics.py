"""``outbox topics``: what an application declares of its topics.

And the acts on a topic as a whole: its dispatch is paused and resumed, and one that is gone is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from outbox.cli.database import DatabasesOptions
from outbox.cli.exits import Code, Failure
from outbox.cli.options import AppOption, command
from outbox.cli.output import (
    ListForm,
    ListFormOption,
    Output,
    OutputOption,
    RowShape,
    first_line,
    print_as,
    table,
)
from outbox.cli.processes import load_quietly
from outbox.cli.whole_acts import add_acts
from outbox.message.topic import Topic
from outbox.operator.topics import TopicPause

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


add_acts(topics_app, "topics")


# --- what an application declares ------------------------------------------------------------------------------------


def _declared(path: str | None) -> Mapping[str, Topic[Any]]:
    if path is None:
        raise Failure("say where your Outbox is: --app MODULE:OBJECT (or OUTBOX_APP)", Code.USAGE)
    return load_quietly(path).topics


def _reads_since(topic: Topic[Any]) -> int:
    missing = topic.missing_upcasters()
    return missing[-1] + 1 if missing else 1
