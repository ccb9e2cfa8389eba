"""Tests that run inside of Django, by pytest-django; in a process of their own, for all of which its settings count."""

from __future__ import annotations

import pytest

from tests.django.conftest import INSIDE, Project


@pytest.mark.parametrize("name", ["carrier", "handling", "rolled_back"])
def test_inside(empty: Project, name: str) -> None:
    """Each file passes."""
    _passes(empty, name)


def test_the_carrier_on_psycopg2(empty: Project) -> None:
    """A Django whose backend has psycopg2 sends as well."""
    _passes(empty, "carrier", "with_psycopg2")


def _passes(empty: Project, name: str, settings: str = "settings") -> None:
    configuration = ["-c", str(INSIDE / "pytest.ini"), "--rootdir", str(INSIDE), "--confcutdir", str(INSIDE)]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--ds", f"tests.django.inside.{settings}"]
    written = empty.run("-m", "pytest", *configuration, *options, str(INSIDE / f"{name}.py"))
    assert " passed" in written
    assert "skipped" not in written
