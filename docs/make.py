"""Build the documentation as a site: the pages beside this file, and a reference that is made from the code.

``python docs/make.py`` writes build/docs (Markdown) and build/site (HTML); it needs the extras
``docs`` and ``console``.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, is_typeddict

import click
import typer

import outbox
from outbox import asgi, cli, errors, testing
from outbox.acts.changes import Act, Noun
from outbox.acts.messages import acts_for
from outbox.acts.whole_acts import WHOLE_ACTS, WholeAct
from outbox.app import Outbox
from outbox.calling.function import CalledFunction
from outbox.check.asker import Checker
from outbox.cli.output import Code, as_failure
from outbox.compensate.compensation import Compensation
from outbox.console import AllowAll, ConsoleOptions, auth, create_console_app, create_console_router
from outbox.console import events as console_events
from outbox.console.problems import as_problem
from outbox.consumer.subscription import Subscription
from outbox.message import declared
from outbox.operator.health.rules import RULES, Thresholds
from outbox.operator.operator import OutboxOperator
from outbox.reader import shape_of
from outbox.settings import Settings
from outbox.telemetry import events
from outbox.telemetry.hooks import TelemetryEvent

HERE = Path(__file__).parent
TARGET = HERE.parent / "build"

CONFIG = """[project]
site_name = "outbox"
site_description = "Transactional messages as tables next to your data, on PostgreSQL"
docs_dir = "docs"
site_dir = "site"
copyright = "VERSION"
REPOSITORY
nav = [
  { "Why" = "index.md" },
  { "Quick start" = "quick-start.md" },
  { "Guide" = ["sending.md", "checking.md", "consuming.md", "compensating.md", "delivering.md",
    "relaying.md", "capturing.md", "rocketmq.md", "flows.md", "topics.md", "testing.md"] },
  { "Frameworks" = ["fastapi.md", "litestar.md", "flask.md", "django.md"] },
  { "Operations" = ["operating.md", "observing.md", "console.md", "deploying.md"] },
  { "Reconciling" = ["reconciling.md", "spark.md"] },
  { "How it works" = ["how-it-works.md", "peer_rules.md", "order_balance.md",
    "rocketmq-conformance.md"] },
  { "Reference" = [REFERENCE] },
]

[project.theme]
language = "en"
font = false
features = ["content.code.copy", "navigation.footer", "navigation.indexes", "navigation.sections", "navigation.top",
  "search.highlight"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Dark"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Light"
"""


def write(target: Path) -> Path:
    """Write the site's configuration and all pages below ``target``; return the configuration."""
    docs = target / "docs"
    if docs.exists():
        shutil.rmtree(docs)
    docs.mkdir(parents=True)
    for path in sorted(HERE.iterdir()):
        if path.suffix == ".md":
            (docs / path.name).write_text(_for_the_site(path.read_text("utf-8")), "utf-8")
        elif path.suffix == ".png":
            shutil.copy(path, docs)
    landing = docs / "index.md"
    # Its picture is wide.
    wide = "---\nhide: [toc]\n---\n\n" + landing.read_text("utf-8").replace("<!-- the picture -->", _picture(), 1)
    landing.write_text(wide, "utf-8")
    (docs / "reference").mkdir()
    for name, (title, make) in REFERENCE.items():
        page = f"# {title}\n\n" + "\n".join(make()).rstrip() + "\n"
        (docs / "reference" / f"{name}.md").write_text(page, "utf-8")
    names = ", ".join(f'"reference/{name}.md"' for name in REFERENCE)
    config = target / "zensical.toml"
    known = {"REFERENCE": names, "VERSION": f"outbox {outbox.__version__}", "REPOSITORY": _repository()}
    text = CONFIG
    for word, what in known.items():
        text = text.replace(word, what, 1)
    config.write_text(text, "utf-8")
    return config


def _picture() -> str:
    """Return the picture of the plan of the house, as it stands there."""
    plan = (HERE.parent / "ARCHITECTURE.md").read_text("utf-8")
    return plan[plan.index("```text") : plan.index("```\n", plan.index("```text") + 7) + 4]


def _repository() -> str:
    """Return the setting of the link to the repository, as far as the package names one."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    urls = {name.lower(): url for name, url in project.get("urls", {}).items()}
    return f'repo_url = "{urls["repository"]}"' if "repository" in urls else ""


def _for_the_site(page: str) -> str:
    """Return a page of the repository as a page of the site: without what only tests read, with the site's links."""
    page = re.sub(r"^<!-- (?:setup\n.*?\n|not run: .*?)-->\n+", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"`\1`", page)


# --- Docstrings and signatures --------------------------------------------------------------------------------


def _doc(text: str | None) -> Iterator[str]:
    """Return a docstring as Markdown: literals, blocks after ``::``, and lists of what is raised."""
    lines = inspect.cleandoc(text or "").replace("``", "`").splitlines()
    code = False
    for number, line in enumerate(lines):
        if code and line and not line.startswith("    "):
            code = False
            yield "```\n"
        if line.endswith("::"):
            code = True
            if line != "::":
                yield line[:-1] + "\n"
            yield "```text"
        elif line in {"Raises:", "Yields:", "Args:", "Returns:"}:
            yield f"**{line[:-1]}**\n"
        elif not code and re.match(r"    \w+(?:, \w+)*: ", line):
            name, _, what = line.strip().partition(": ")
            yield f"- {', '.join(f'`{each}`' for each in name.split(', '))}: {what}"
        elif code and number + 1 == len(lines):
            yield line.removeprefix("    ")
            yield "```\n"
        else:
            yield line.removeprefix("    ") if code else line
    yield ""


def _signature(name: str, function: Callable[..., Any], prefix: str = "") -> Iterator[str]:
    parameters = list(inspect.signature(function).parameters.values())
    # Annotations are texts, which are shown in quotes.
    shown = [
        re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(each).replace("model.", ""))
        for each in parameters
        if each.name not in {"self", "cls"}
    ]
    if (keyword := next((n for n, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY), None)) is not None:
        skipped = sum(each.name in {"self", "cls"} for each in parameters)
        if not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            shown.insert(keyword - skipped, "*")
    if name in _DECLARED and shown[-1].startswith("**"):
        shown[-1:] = _options(*_DECLARED[name])
    one_line = f"{prefix}{name}({', '.join(shown)})"
    result = inspect.signature(function).return_annotation
    shown_result = str(getattr(result, "__name__", result)).replace("model.", "")
    arrow = "" if result is inspect.Signature.empty else f" -> {shown_result}"
    yield "```text"
    if len(one_line + arrow) <= 100:
        yield one_line + arrow
    else:
        yield f"{prefix}{name}("
        yield from (f"    {each}," for each in shown)
        yield f"){arrow}"
    yield "```\n"


#: What the decorators of an Outbox declare, and the types of their options.
_DECLARED: Mapping[str, tuple[type[CalledFunction], tuple[type, ...]]] = {
    "consumer": (Subscription, (declared.OutsideOptions, declared.ConsumerOptions)),
    "checker": (Checker, (declared.CheckerOptions,)),
    "compensation": (Compensation, (declared.CompensationOptions,)),
}


def _options(kind: type[CalledFunction], types: tuple[type, ...]) -> Iterator[str]:
    """Yield the options of a called function, as its decorator takes them."""
    hints = {name: hint.__forward_arg__ for each in types for name, hint in each.__annotations__.items()}
    hints |= {"takes_batch": "bool", "transactional": "bool"}  # they choose the decorator's type
    for each in dataclasses.fields(kind):
        if each.name in hints:
            default = f"settings.{kind.settings[each.name]}" if each.name in kind.settings else repr(each.default)
            is_needed = each.default is dataclasses.MISSING and each.name not in kind.settings
            yield f"{each.name}: {hints[each.name]}" + ("" if is_needed else f" = {default}")


def _class(kind: type, *, level: int = 2, prefix: str | None = None, methods: bool = True) -> Iterator[str]:
    name = kind.__name__
    yield f"{'#' * level} {prefix or name}\n"
    if dataclasses.is_dataclass(kind) or "__init__" in vars(kind):
        yield from _signature(name, kind)
    if is_typeddict(kind):
        options = (f"{each}: {hint.__forward_arg__}" for each, hint in kind.__annotations__.items())
        yield from ("```text", *options, "```\n")
    yield from _doc(kind.__doc__)
    if not methods:
        return
    for each, member in inspect.getmembers(kind):
        if each.startswith("_") or each not in _own(kind):
            continue
        if isinstance(inspect.getattr_static(kind, each), property):
            yield f"{'#' * (level + 1)} {name}.{each} (property)\n"
            yield from _doc(member.__doc__)
        elif inspect.isfunction(member) or inspect.ismethod(member):
            yield f"{'#' * (level + 1)} {name}.{each}\n"
            yield from _signature(each, member, f"{name}." if inspect.ismethod(member) else ".")
            yield from _doc(member.__doc__)


def _own(kind: type) -> set[str]:
    """Return the names that a class or one of our classes above it declares."""
    return {name for each in kind.__mro__ if each.__module__.startswith("outbox") for name in vars(each)}


def _table(head: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(" ".join(str(cell).replace("|", "\\|").split()) for cell in row) + " |"
    yield ""


# --- The pages of the reference -------------------------------------------------------------------------------


def api() -> Iterator[str]:
    """The public names, the operator's calls, and the kit for tests."""
    yield "What `from outbox import …` offers, then the operator's calls, the tests' kit and the console.\n"
    yield from _class(Outbox)
    yield from _class(OutboxOperator, prefix="Outbox.operator")
    for name in sorted(set(outbox.__all__) - {"Outbox", "OutboxError", "__version__", "Settings"}):
        value = getattr(outbox, name)
        if isinstance(value, type):
            yield from _class(value)
        else:
            yield f"## {name}\n"
            yield "The default of the parameter in which a decorated function takes its session.\n"
    yield "## outbox.asgi\n"
    yield from _class(asgi.TransactionMiddleware, level=3, methods=False)
    yield "### request_session\n"
    yield from _doc(asgi.request_session.__doc__)
    yield "## outbox.testing\n"
    yield from _doc(testing.__doc__)
    for name, function in inspect.getmembers(testing, inspect.isfunction):
        if function.__module__.startswith("outbox.testing") and not name.startswith("_"):
            yield f"### testing.{name}\n"
            yield from _signature(name, function, "testing.")
            yield from _doc(function.__doc__)
    for _, kind in inspect.getmembers(testing, inspect.isclass):
        yield from _class(kind, level=3, methods=False)
    yield "## outbox.console\n"
    for make in (create_console_router, create_console_app):
        yield f"### {make.__name__}\n"
        yield from _signature(make.__name__, make)
        yield from _doc(make.__doc__)
    yield from _class(ConsoleOptions, level=3, methods=False)
    for kind in (auth.Basic, auth.Bearer, auth.TrustedHeader, auth.AnyOf, auth.AllowAll):
        yield from _class(kind, level=3, methods=False)


def all_errors() -> Iterator[str]:
    """The tree of errors, with what follows from the kind of each."""
    yield "All are in `outbox.errors`.\n"
    yield "```text\n" + "\n".join(_tree(errors.OutboxError)) + "\n```\n"
    yield "## What follows from an error's kind\n"
    yield from _table(("Kind", "Exit code of the command line", "HTTP status", "Problem"), map(_kind, errors.ErrorKind))
    yield "## The errors\n"
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, errors.OutboxError)]
    rows = ((f"`{each.__name__}`", f"`{each.kind.value}`", _first_line(each.__doc__)) for each in classes)
    yield from _table(("Error", "Kind", "Means"), rows)
    yield "## Exit codes\n"
    yield from _table(("Code", "Means"), ((code.value, code.meaning) for code in Code))


def _tree(kind: type[BaseException]) -> Iterator[str]:
    yield f"{kind.__name__}{' (also ValueError)' if ValueError in kind.__bases__ else ''}"
    below = [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
    for each in below:
        (first, *lines), is_last = _tree(each), each is below[-1]
        yield f"{'└' if is_last else '├'}── {first}"
        yield from (f"{' ' if is_last else '│'}   {line}" for line in lines)


def _kind(kind: errors.ErrorKind) -> tuple[object, ...]:
    error = type("Example", (errors.OutboxError,), {"kind": kind})("")
    failure, problem = as_failure(error), as_problem(error)
    code = failure.code.value if failure else ""
    return (
        f"`{kind.value}`",
        code,
        problem.status_code if problem else 500,
        f"`{problem.slug if problem else 'internal'}`",
    )


def settings() -> Iterator[str]:
    """Every field of `Settings`."""
    yield from _doc((Settings.__doc__ or "").partition("\n")[0])
    yield "In code `Settings(name=…)`, in the environment `OUTBOX_NAME`. Durations are seconds, or have units in the"
    yield "environment: `90s`, `1h30m`, `7d`.\n"
    shapes = shape_of(Settings)
    for page in dict.fromkeys(shape.option.page for shape in shapes):
        yield f"## {page.capitalize()}\n"
        yield f"Explained in [{page.capitalize()}](../{page}.md).\n"
        rows = (
            (f"`{shape.name}`", f"`{shape.default!r}`", shape.option.help, shape.expected)
            for shape in shapes
            if shape.option.page == page
        )
        yield from _table(("Setting", "Default", "What it is", "Values"), rows)


def commands() -> Iterator[str]:
    """Every command with its options."""
    command = typer.main.get_command(cli.app)
    yield from _command("outbox", command, 2)


def _command(path: str, command: Any, level: int) -> Iterator[str]:
    yield f"{'#' * min(level, 4)} {path}\n"
    with click.Context(command, info_name=path, max_content_width=100) as context:
        usage = " ".join(command.get_usage(context).split()[1:])
        help_ = inspect.cleandoc(command.help or "").replace("\b\n", "")
    yield f"```text\n{usage}\n```\n"
    before, examples, after = help_.partition("Examples:") if "Examples:" in help_ else help_.partition("Example:")
    yield before.replace("\f", "").strip() + "\n"
    if examples:
        yield f"```text\n{inspect.cleandoc(after).strip()}\n```\n"
    rows = [record for each in command.params if (record := each.get_help_record(context)) and each.name != "help"]
    if rows:
        yield from _table(("Option", "What it does"), ((f"`{names}`", _escaped(what)) for names, what in rows))
    for name, below in sorted(getattr(command, "commands", {}).items()):
        if not below.hidden:
            yield from _command(f"{path} {name}", below, level + 1)


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")


def http() -> Iterator[str]:
    """Every endpoint, from the OpenAPI document."""
    app = create_console_app("postgresql+psycopg://127.0.0.1/none", authorizer=AllowAll(), metrics="open")
    document = app.openapi()
    yield _escaped(document["info"]["description"]) + "\n"
    yield "Paths are below the prefix of the console. The full description is its `/api/v1/openapi.json`.\n"
    tags: dict[str, list[tuple[object, ...]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parameters = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
            row = (
                f"`{method.upper()} {path}`",
                _escaped(operation.get("description") or operation.get("summary", "")).partition("\n\n")[0],
                ", ".join(f"`{name}`" for name in parameters),
            )
            tags.setdefault(next(iter(operation.get("tags", ())), "others"), []).append(row)
    for tag, rows in tags.items():
        yield f"## {tag.capitalize()}\n"
        yield from _table(("Request", "What it does", "Parameters"), iter(rows))


def acts() -> Iterator[str]:
    """The table of acts, of which commands, endpoints and pages are made."""
    yield "What an operator can do. Commands, HTTP endpoints, the console's pages, the audit and `Outbox.operator`"
    yield "use the same names.\n"
    nouns: dict[Noun, str] = {
        "message": "To a message",
        "half": "To an undecided half message",
        "inbox": "To a message in a group's inbox",
    }
    for noun, title in nouns.items():
        yield f"## {title}\n"
        yield from _table(("Act", "What it does", "From the states", "Role", "Options"), map(_act, acts_for(noun)))
    wholes = {
        "To a group": "group",
        "To a topic": "topics",
        "To a schedule": "cron",
        "To a lock": "lock",
        "To dead letters": "dead",
        "A copy with another body": "messages",
        "To a rule of `outbox doctor`": "rule",
        "To a list of the console": "filter",
        "To a reconciliation": "reconcile",
        "To a saga": "sagas",
    }
    for title, word in wholes.items():
        yield f"## {title}\n"
        declared = (each for each in WHOLE_ACTS.values() if each.noun == word)
        yield from _table(("Act", "What it does", "Role", "Options"), map(_declared, declared))


def _declared(act: WholeAct) -> tuple[object, ...]:
    options = "; ".join(f"`{each.name}`" for each in shape_of(act.fields))
    reason = "needs a reason" if act.needs_reason else ""
    what = _escaped(f"{act.summary}. {act.details}")
    return f"`{act.name}`", what, act.role, "; ".join(filter(None, (reason, options)))


def _act(act: Act) -> tuple[object, ...]:
    options = ", ".join(f"`{option.name}`: {option.help}" for option in act.options)
    reason = "needs a reason" if act.needs_reason else ""
    states = ", ".join(f"`{state}`" for state in sorted(act.from_states))
    what = _escaped(f"{act.summary}. {act.details}".replace("``", "`"))
    return f"`{act.name}`", what, states, act.role, "; ".join(filter(None, (reason, options)))


def all_events() -> Iterator[str]:
    """Yield the page of the events, by their code."""
    yield "What the framework tells of, as records of the log and to hooks ([Observing](../observing.md)). The classes"
    yield "are in `outbox.telemetry.events`, those of the console in `outbox.console.events`.\n"
    all_kinds = [
        kind for module in (events, console_events) for kind in vars(module).values() if isinstance(kind, type)
    ]
    kinds = [kind for kind in all_kinds if issubclass(kind, TelemetryEvent) and hasattr(kind, "code")]
    for area in dict.fromkeys(kind.area for kind in kinds):
        yield f"## Logger `outbox.{area}`\n"
        rows = (_event(kind) for kind in kinds if kind.area == area)
        yield from _table(("Event", "Class", "Usual level", "What it is", "Facts"), rows)


def _event(kind: type[TelemetryEvent]) -> tuple[object, ...]:
    facts = ", ".join(f"`{each.name}`" for each in dataclasses.fields(kind) if each.name != "error")
    what = " ".join(inspect.cleandoc(kind.__doc__ or "").split()).replace("``", "`")
    return f"`{kind.code}`", f"`{kind.__name__}`", logging.getLevelName(kind.usual_level), _escaped(what), facts


def findings() -> Iterator[str]:
    """The rules of health, by which the doctor and the console's overview judge."""
    yield "What `outbox doctor` and the console's overview can find, by its code. Each finding comes with its numbers,"
    yield "and with the command, SQL or change that mends it.\n"
    rows = ((f"`{code.partition('/')[0]}`", rule.severity, _in_words(rule.sentence)) for code, rule in RULES.items())
    yield from _table(("Code", "Severity", "Sentence"), rows)
    yield "\n## Thresholds\n"
    yield from _doc(Thresholds.__doc__)
    yield from _table(
        ("Threshold", "Value"), ((f"`{each.name}`", each.default) for each in dataclasses.fields(Thresholds))
    )


def _in_words(template: str) -> str:
    """Return the template of a sentence with the names of its values, or the plural of its words."""

    def word(match: re.Match[str]) -> str:
        name, spec = match["name"], match["spec"] or ""
        several = spec.partition("|")[2]
        return (several if spec.startswith("=") else f"*n* {several}") if several else f"*{name}*"

    return re.sub(r"\{(?P<name>\w+)(?:!r)?(?::(?P<spec>[^{}]*))?\}", word, template)


def _first_line(text: str | None) -> str:
    return inspect.cleandoc(text or "").partition("\n\n")[0]


REFERENCE: Mapping[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "api": ("Python", api),
    "settings": ("Settings", settings),
    "acts": ("Acts of an operator", acts),
    "cli": ("Commands", commands),
    "http": ("HTTP", http),
    "errors": ("Errors", all_errors),
    "findings": ("Findings of the doctor", findings),
    "events": ("Events", all_events),
}


def main(arguments: list[str]) -> int:
    """Build the site; ``--serve`` shows it instead, on this machine."""
    config = write(TARGET)
    verb = ["serve"] if "--serve" in arguments else ["build", "--clean", "--strict"]
    command = [sys.executable, "-m", "zensical", *verb, "--config-file", str(config)]
    return subprocess.run(command, check=False, cwd=TARGET).returncode  # noqa: S603 - nothing of it comes from outside


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
