"""The public face: names, the tree of errors, what an import costs."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outbox
from outbox import errors

ROOT = Path(__file__).parents[2]


def test_all_is_sorted_complete_and_importable() -> None:
    """`__all__` names exactly what can be imported from the package, and `dir` shows it."""
    assert sorted(outbox.__all__) == sorted(set(outbox.__all__))
    for name in outbox.__all__:
        assert getattr(outbox, name) is not None
    assert set(outbox.__all__) <= set(dir(outbox))
    star: dict[str, object] = {}
    exec("from outbox import *", star)  # noqa: S102 - as a user may write it
    assert set(outbox.__all__) <= set(star)


def test_unknown_name() -> None:
    """A name that isn't there is an AttributeError, so that `hasattr` and `from outbox import` behave."""
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        outbox.nope  # type: ignore[attr-defined] # noqa: B018
    assert not hasattr(outbox, "nope")


def test_every_error_lives_in_one_module() -> None:
    """Errors to catch are in `outbox.errors`: no other module declares one below `OutboxError`."""
    outside = [
        f"{path.relative_to(ROOT)}: {match}"
        for path in (ROOT / "outbox").rglob("*.py")
        if path.name != "errors.py"
        for match in re.findall(rf"^class (\w+)\((?:{'|'.join(_classes())})\b", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert outside == []


def _classes() -> list[str]:
    return [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]


def test_every_kind_of_error_has_an_exit_code_and_a_status() -> None:
    """From an error's kind follow the exit code of the command line and the status of the console."""
    from outbox.cli.output import as_failure
    from outbox.console.problems import as_problem

    unexpected = {errors.ErrorKind.SETTINGS, errors.ErrorKind.NO_RESULT, errors.ErrorKind.INTERNAL}
    for kind in errors.ErrorKind:
        error = type("Some", (errors.OutboxError,), {"kind": kind})("why")
        assert as_failure(error) is not None
        assert (as_problem(error) is None) == (kind in unexpected)


def test_what_a_value_causes_is_a_value_error() -> None:
    """Python's own class catches what a value has caused."""
    for name in ("InvalidMessage", "InvalidSettings", "InvalidHandler"):
        assert issubclass(getattr(errors, name), ValueError)


def test_every_error_says_what_it_is() -> None:
    """Each error class has a docstring of its own."""
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        assert kind.__doc__


def test_errors_of_decisions_survive_a_pickle() -> None:
    """Errors cross processes (executors, task queues) with what they know."""
    import pickle
    from uuid import UUID

    for error in (
        errors.HalfNotFound(UUID(int=1)),
        errors.AlreadyCommitted(UUID(int=1), "check"),
        errors.AlreadyRolledBack(UUID(int=1), "operator"),
    ):
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert type(again) is type(error)
        assert (str(again), vars(again)) == (str(error), vars(error))


def test_import_is_light() -> None:
    """Importing `outbox`, and naming all of its public names but the worker, imports none of the heavy libraries."""
    heavy = {"sqlalchemy.orm", "psycopg", "alembic", "apscheduler", "typer", "pydantic"}
    code = (
        "import sys, outbox\nfor name in outbox.__all__:\n    name == 'Worker' or getattr(outbox, name)\n"
        f"print(*{heavy!r} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
