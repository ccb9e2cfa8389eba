"""``outbox topics``: what an application declares of its topics, for people, for CI, and for other services.

And the acts on a topic as a whole: its dispatch is paused and resumed, and one that is gone is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    print_json,
    say,
    table,
)
from outbox.cli.processes import load_quietly
from outbox.cli.whole_acts import add_acts
from outbox.errors import InvalidSettings
from outbox.message.topic import Topic
from outbox.operator.topics import TopicPause
from outbox.text import counted, write_whole

if TYPE_CHECKING:
    from outbox.app import Outbox
    from outbox.message.compatibility import Published

topics_app: typer.Typer = typer.Typer(
    name="topics",
    help="Topics as your application declares them: models, versions, and whether releases understand each other.\n\n"
    "No database is needed but to pause the dispatch of a topic, and to delete one that is gone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

FileArgument = Annotated[
    Path, typer.Argument(metavar="[FILE]", help="What releases have published; it lives in your repository.")
]
_PUBLISHED = Path("topics.json")


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


@topics_app.command()
def check(app: AppOption = None, file: FileArgument = _PUBLISHED) -> None:
    """Check in CI that this code reads what other releases wrote, and they what it writes. Changes nothing.

    Within a version optional fields may come and go; what is more than that needs a new version and an upcaster. The
    exit code is 6 if a release would meet a message that it can't read, or if what this code writes isn't in FILE.

    \b
    Example:
      outbox topics check --app shop.messages:outbox topics.json
    """
    from outbox.message.compatibility import problems, unpublished  # noqa: PLC0415 - what the other commands needn't import

    topics, published = _declared(app), _read(file)
    found = [f"{each.topic}: {each.problem}" for each in problems(topics, published)]
    if not found:
        found = [
            f"{name}: this form of version {topics[name].version} isn't in {file}; outbox topics export adds it"
            for name in unpublished(topics, published)
        ]
    if found:
        raise Failure("; ".join(found), Code.PROBLEMS)
    say(f"{counted(len(topics), 'topic')} compatible with {file}")


@topics_app.command()
def export(app: AppOption = None, file: FileArgument = _PUBLISHED) -> None:
    """Add the JSON Schemas of this code to FILE, beside those of releases before; refused where they don't fit.

    \b
    Example:
      outbox topics export --app shop.messages:outbox topics.json
    """
    from outbox.message.compatibility import as_json, problems, publish, unpublished  # noqa: PLC0415 - as above

    topics, published = _declared(app), _read(file, may_be_new=True)
    if found := [f"{each.topic}: {each.problem}" for each in problems(topics, published)]:
        raise Failure(f"nothing was written: {'; '.join(found)}", Code.PROBLEMS)
    new = unpublished(topics, published)
    if new:
        write_whole(file, json.dumps(as_json(publish(topics, published)), indent=2, ensure_ascii=False) + "\n")
    say(f"added to {file}: {', '.join(sorted(new)) or 'nothing, all is in it'}")


@topics_app.command()
def asyncapi(
    app: AppOption = None,
    version: Annotated[str, typer.Option("--api-version", help="The version of your service's interface.")] = "1",
) -> None:
    """Print an AsyncAPI 3.0.0 document: channels, messages with their schemas, what is sent and received.

    \b
    Example:
      outbox topics asyncapi --app shop.messages:outbox > asyncapi.json
    """
    from outbox.message.asyncapi import document  # noqa: PLC0415 - what the other commands needn't import

    outbox = _load(app)
    topics = outbox.topics
    remote = {topic for (topic, _), subscription in outbox.subscriptions.items() if subscription.source is not None}
    print_json(document(topics, topics.keys() - remote, outbox.subscriptions, title=outbox.group, version=version))


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


def _load(path: str | None) -> Outbox:
    if path is None:
        raise Failure("say where your Outbox is: --app MODULE:OBJECT (or OUTBOX_APP)", Code.USAGE)
    return load_quietly(path)


def _declared(path: str | None) -> Mapping[str, Topic[Any]]:
    return _load(path).topics


def _reads_since(topic: Topic[Any]) -> int:
    missing = topic.missing_upcasters()
    return missing[-1] + 1 if missing else 1


def _read(file: Path, *, may_be_new: bool = False) -> Published:
    from outbox.message.compatibility import from_json  # noqa: PLC0415 - what the other commands needn't import

    if not file.exists():
        if may_be_new:
            return {}
        raise Failure(f"there is no {file}; outbox topics export {file} makes it", Code.NOT_FOUND)
    try:
        return from_json(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, InvalidSettings) as error:
        raise Failure(f"{file}: {error}", Code.CONFIG) from None
