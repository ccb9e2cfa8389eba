"""No text of ours repeats a password, wherever a URL was given in place of something else."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import pickle
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import create_engine

import outbox
from outbox import Outbox, Settings
from outbox.console import create_console_app
from outbox.database import migration
from outbox.database.dialect import url_of
from outbox.database.engines import address_of, engine_of
from outbox.errors import InvalidSettings, OutboxError, without_secrets
from outbox.reconcile.config import access_of, read_mapping
from outbox.text import database_address, described
from outbox.worker import Worker
from tests.cli.conftest import run_cli

SECRET = "s3cr3t"  # noqa: S105 - one of the tests'
FORMS = (
    f"postgresql://me:{SECRET}@host:5432/shop",
    f"postgresql+psycopg://me@corp:{SECRET}@host/shop",
    f"postgresql://me:a/{SECRET}@{SECRET}@host/shop",
    f"postgresql://me:p {SECRET}'\"@host/shop",
    f"postgresql://host/shop?user=me&password={SECRET}&sslmode=require",
    f"postgresql://host/shop?sslpassword={SECRET}",
    f"jdbc:postgresql://host/shop?user=me&password={SECRET}",
    f"host=host user=me password={SECRET} dbname=shop",
    f"host=host password='a {SECRET}' dbname=shop",
    f"PGPASSWORD={SECRET}",
    f"postgresql://me:***@{SECRET}@host/shop",
    f"failed to resolve host 'x@{SECRET}@host': Name or service not known",
    f'could not translate host name "{SECRET}@host" to address',
)


def said(error: BaseException) -> str:
    """Return all that an exception says, with all that is behind it, shown by tracebacks or not."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and each not in seen:
            seen.append(each)
            waiting += [each.__cause__, each.__context__]
    texts = [text for each in seen for text in (str(each), repr(each), str(vars(each)), str(each.args))]
    return "\n".join([*texts, *traceback.format_exception(error)])


@pytest.mark.parametrize("form", FORMS)
def test_what_an_error_repeats_is_without_its_password(form: str) -> None:
    """As it is, quoted, in a dict, beside others; after a way to another process too; the rest is still readable."""
    for text in (f"{form!r} is no name", f"{form} and {form}", str({"password": SECRET, "url": form})):
        error = OutboxError(text)
        assert SECRET not in said(error)
        assert SECRET not in said(pickle.loads(pickle.dumps(error)))  # noqa: S301 - made here
    assert "host" in without_secrets(form) or "PGPASSWORD" in form


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me@host:5432/shop is not a number",
        "the password is wrong; write to ops@corp.example",
        "two: postgresql://me:***@a/x and postgresql://me:***@b/y",
        "order 5: ask ops@corp.example, see https://corp.example/a:b",
    ],
)
def test_what_is_no_password_stays(text: str) -> None:
    """Errors go on naming things."""
    assert without_secrets(text) == text


@pytest.mark.parametrize("password", [f"p@{SECRET}", f"{SECRET}@x@{SECRET}", f"a/{SECRET}@{SECRET}"])
def test_an_at_in_a_password_is_refused_with_the_mend(password: str) -> None:
    """Else its tail would be the host, which errors name; an engine that was made so is described without it."""
    url = f"postgresql+psycopg://me:{password}@127.0.0.1:1/shop"
    for refuse in (url_of, address_of, access_of):
        with pytest.raises(InvalidSettings, match="%40") as refused:
            refuse(url)
        assert SECRET not in said(refused.value)
    engine = create_engine(url)
    shown = [database_address(engine.url), described(engine.url, "outbox"), repr(Outbox(engine))]
    shown += [str(OutboxError(engine.url.render_as_string(hide_password=True)))]
    assert SECRET not in str(shown)
    result = run_cli("db", "current", "--url", url)
    assert "%40" in result.err
    assert SECRET not in result.out + result.err


def test_an_outbox_on_a_url_is_refused_with_the_mend() -> None:
    """The most likely mistake."""
    with pytest.raises(InvalidSettings, match=r"create_engine\(url\)") as refused:
        Outbox(FORMS[0])  # type: ignore[arg-type]
    assert SECRET not in said(refused.value)
    assert SECRET not in repr(Outbox(create_engine(FORMS[4].replace("postgresql", "postgresql+psycopg"))))


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return what users call: of the package, of an Outbox, of its operator, and beside them."""
    yield from ((name, getattr(outbox, name)) for name in outbox.__all__ if callable(getattr(outbox, name)))
    made = Outbox(create_engine("postgresql+psycopg://127.0.0.1:1/none"), settings=Settings())
    for owner in (made, made.operator):
        for name, _ in inspect.getmembers(type(owner), inspect.isfunction):
            if not name.startswith("_") and name not in {"worker", "active"}:
                yield f"{type(owner).__name__}.{name}", getattr(owner, name)
    beside: dict[str, Callable[..., Any]] = {"Worker": Worker, "console": create_console_app, "url_of": url_of}
    beside |= {"engine_of": engine_of, "address_of": address_of, "read_mapping": read_mapping}
    yield from beside.items()
    yield from ((f"migration.{name}", getattr(migration, name)) for name in ("upgrade", "current", "check"))


CALLS = dict(public())


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_url_in_place_of_each_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever takes something else refuses it, or fails later, without its password; so does what it makes."""
    function = CALLS[name]
    monkeypatch.setattr("outbox.database.engines._CONNECT_TIMEOUT", 1)
    parameters = inspect.signature(function).parameters.values()
    required = [
        each
        for each in parameters
        if each.default is each.empty and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
    ]
    fill: dict[str, Any] = {"topic": "paid", "group": "mail", "by": "me", "why": "so", "function": print}
    url = FORMS[0]
    for chosen in parameters:
        if chosen.kind in {chosen.VAR_POSITIONAL, chosen.VAR_KEYWORD}:
            continue
        values = {each.name: fill.get(each.name, "x") for each in required} | {chosen.name: url}
        positional = [values.pop(each.name) for each in required if each.kind is each.POSITIONAL_ONLY]
        try:
            made = function(*positional, **values)
            if inspect.iscoroutine(made):
                made.close()
            shown = ""  # what it makes is the user's own
        except Exception as error:
            # Python's own (a key of a dict, a type that is no expression) say what they like.
            shown = f"{error!r} {error}" if isinstance(error, OutboxError) else ""
        assert SECRET not in shown, (name, chosen.name)


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Settings)])
def test_a_url_in_place_of_each_setting(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In code and in the environment."""
    monkeypatch.setenv(f"OUTBOX_{field.upper()}", FORMS[0])
    value: dict[str, Any] = {field: FORMS[0]}
    for make in (Settings.from_env, partial(Settings, **value)):
        try:
            shown = repr(make())
        except Exception as error:
            shown = said(error)
        assert SECRET not in shown


COMMANDS = (
    ("messages", "list", "--since"),
    ("messages", "list", "--limit"),
    ("messages", "show"),
    ("stats", "--watch"),
    ("run", "--app"),
    ("run", "--roles"),
    ("run", "--app", "x:y", "--bind"),
    ("db", "upgrade", "--lock-timeout"),
    ("db", "upgrade", "--part"),
    ("db", "sql", "--from"),
    ("db", "grants", "--to", "x", "--role"),
    ("doctor", "--roles"),
    ("db", "current", "--schema"),
    ("reconcile", "--topic", "t", "--group", "g", "--since"),
    ("lock", "end"),
)


@pytest.mark.parametrize(("command", "form"), list(itertools.product(COMMANDS, FORMS[:3])))
def test_a_url_in_place_of_an_option(command: tuple[str, ...], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line says what is wrong without it."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", "postgresql://127.0.0.1:1/none")
    result = run_cli(*command, form)
    assert result.code != 0
    assert SECRET not in result.out + result.err


@pytest.mark.parametrize("form", FORMS[:10])
def test_the_address_of_a_database_has_no_password(form: str) -> None:
    """Nor has what is said of a URL that can't be read, or what SQLAlchemy said of it."""
    try:
        shown = address_of(form)
    except Exception as error:
        shown = said(error)
    assert SECRET not in shown
