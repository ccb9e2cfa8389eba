"""The public face: names, the tree of errors, what an import costs, and types as a user's mypy sees them."""

from __future__ import annotations

import inspect
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
    assert set(outbox._HOME) | {"__version__"} == set(outbox.__all__)
    assert set(outbox.__all__) <= set(dir(outbox))


def test_unknown_name() -> None:
    """A name that isn't there is an AttributeError, so that `hasattr` and `from outbox import` behave."""
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        outbox.nope  # noqa: B018
    assert not hasattr(outbox, "nope")


def test_every_error_is_public() -> None:
    """Whoever must catch an error can import it from `outbox`."""
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined <= set(outbox.__all__)


def test_error_tree_is_as_drawn() -> None:
    """The tree in the docstring of `outbox.errors` is the one of the classes."""
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = line.strip(" │├└─").split(" ")[0].split("(")[0]
        if hasattr(errors, name):
            drawn.append((line.index(name), name))

    real: list[tuple[int, str]] = []

    def walk(kind: type[BaseException], depth: int) -> None:
        real.append((4 * (depth + 1), kind.__name__))
        for below in kind.__subclasses__():
            if below.__module__ == errors.__name__:  # an extra may have one of its own
                walk(below, depth + 1)

    walk(errors.OutboxError, 0)
    assert drawn == real
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


@pytest.mark.parametrize("heavy", ["sqlalchemy.orm", "psycopg", "alembic", "apscheduler", "typer", "pydantic"])
def test_import_is_light(heavy: str) -> None:
    """Importing `outbox`, and naming all of its public names, imports none of the heavy libraries."""
    code = f"import sys, outbox\nfor name in outbox.__all__: getattr(outbox, name)\nsys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_public_types_as_a_user_sees_them() -> None:
    """mypy, strictly, accepts the example of every public call, and its expected errors are errors."""
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "tests/unit/typed_api.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
