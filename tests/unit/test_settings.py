"""Settings from code and from the environment, refused when they can't work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from outbox import InvalidSettings, Settings


def test_defaults_agree() -> None:
    """The defaults contradict nothing, keep 72 hours, and are the same from an empty environment."""
    assert Settings.from_env({}) == Settings()
    assert Settings().retention == 72 * 3600
    assert len(Settings().retry_delays) == 16


def test_settings_are_frozen() -> None:
    """What was checked can't be changed afterwards."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().queues = 1  # type: ignore[misc]


@pytest.mark.parametrize("field", dataclasses.fields(Settings), ids=lambda field: field.name)
def test_every_setting_can_come_from_the_environment(field: dataclasses.Field[Any]) -> None:
    """Each field has a variable OUTBOX_<NAME>, read as the field's type."""
    default = getattr(Settings(), field.name)
    text = ",".join(str(part) for part in default) if isinstance(default, tuple) else str(default)
    value = getattr(Settings.from_env({f"OUTBOX_{field.name.upper()}": text}), field.name)
    assert value == default
    assert isinstance(value, int) if isinstance(default, int) else type(value) is type(default)


def test_environment_and_overrides() -> None:
    """Overrides in code win over variables; other variables are ignored."""
    environ = {"OUTBOX_SCHEMA": "mine", "OUTBOX_QUEUES": "4", "OUTBOX_LISTEN": "off", "OUTBOX_RETRY_DELAYS": "1, 2.5,"}
    settings = Settings.from_env(environ | {"OUTBOX_DATABASE_URL": "x", "QUEUES": "9"}, queues=2)
    assert (settings.schema, settings.queues, settings.listen) == ("mine", 2, False)
    assert settings.retry_delays == (1.0, 2.5)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("no", False), ("Off", False), ("yes", True)])
def test_booleans(text: str, value: bool) -> None:
    """The usual spellings of yes and no are understood."""
    assert Settings.from_env({"OUTBOX_LISTEN": text}).listen is value


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("OUTBOX_QUEUES", "eight", "OUTBOX_QUEUES='eight' can't be read as int"),
        ("OUTBOX_QUEUES", "", "OUTBOX_QUEUES='' can't be read as int"),
        ("OUTBOX_QUEUES", "2.5", "can't be read as int"),
        ("OUTBOX_RETENTION", "72h", "OUTBOX_RETENTION='72h' can't be read as float"),
        ("OUTBOX_LISTEN", "maybe", "OUTBOX_LISTEN='maybe' can't be read as bool"),
        ("OUTBOX_RETRY_DELAYS", "1;2", "OUTBOX_RETRY_DELAYS='1;2' can't be read as tuple"),
        ("OUTBOX_QUEUES", "0", "queues = 0 must be greater than 0"),
        ("OUTBOX_SCHEMA", "", "schema ''"),
    ],
)
def test_variable_that_cannot_be_read(name: str, text: str, said: str) -> None:
    """A bad variable is named with its value."""
    with pytest.raises(InvalidSettings, match=said):
        Settings.from_env({name: text})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schema": "Outbox"}, "schema 'Outbox' must match"),
        ({"schema": 'a"; DROP'}, "must match"),
        ({"schema": "a" * 51}, "at most 50 characters"),
        ({"schema": "outbox\n"}, "must match"),
        ({"schema": "pg_outbox"}, "schema 'pg_outbox'.*reserved"),
        ({"schema": None}, "schema = None must be"),
        ({"queues": 0}, "queues = 0 must be greater than 0"),
        ({"queues": 4097}, "queues = 4097 is more than 4096"),
        ({"queues": 2.5}, "queues = 2.5 must be int"),
        ({"queues": "8"}, "queues = '8' must be int"),
        ({"queues": True}, "queues = True must be int"),
        ({"max_body_bytes": -1}, "max_body_bytes = -1 must be greater"),
        ({"dispatch_batch": 0}, "dispatch_batch = 0"),
        ({"idle_wait": 0}, "idle_wait = 0"),
        ({"retention": math.nan}, "retention = nan"),
        ({"retention": math.inf}, "retention = inf"),
        ({"immunity": -1}, "immunity = -1 must not be negative"),
        ({"immunity": math.nan}, "immunity = nan"),
        ({"drain_timeout": math.inf}, "drain_timeout = inf"),
        ({"retry_jitter": 1}, r"retry_jitter = 1 must be in \[0, 1\)"),
        ({"retry_jitter": -0.1}, "retry_jitter = -0.1"),
        ({"retry_delays": (1, -1)}, "retry_delays has a negative"),
        ({"retry_delays": (1, math.nan)}, "retry_delays"),
        ({"retry_delays": (1, "2")}, "retry_delays"),
        ({"retry_delays": 5}, "retry_delays = 5 must be"),
        ({"listen": "no"}, "listen = 'no' must be bool"),
    ],
)
def test_value_out_of_range(values: dict[str, Any], said: str) -> None:
    """Each value is checked by itself, and named with what it was."""
    with pytest.raises(InvalidSettings, match=said):
        Settings(**values)


def test_inbox_must_outlive_what_can_come_again() -> None:
    """The inbox may not forget a message that can still come again; the error says by how much."""
    Settings(retention=100, retry_delays=(10, 20), retry_jitter=0, inbox_retention=130)
    with pytest.raises(
        InvalidSettings, match=r"inbox_retention = 129 s is shorter than retention \(100 s\).*at least 130"
    ):
        Settings(retention=100, retry_delays=(10, 20), retry_jitter=0, inbox_retention=129)
    with pytest.raises(InvalidSettings, match="would forget messages"):
        Settings(retention=100, retry_delays=(10, 20), retry_jitter=0.5, inbox_retention=130)


def test_no_retries_at_all() -> None:
    """An empty retry table is a choice: the first failure parks."""
    assert Settings(retry_delays=()).retry_delays == ()
    assert Settings.from_env({"OUTBOX_RETRY_DELAYS": ""}).retry_delays == ()


def test_lists_become_tuples_of_seconds() -> None:
    """Retry delays may be given as a list; a set of settings stays hashable."""
    settings = Settings(retry_delays=[1, 2])  # type: ignore[arg-type]
    assert settings.retry_delays == (1, 2)
    assert hash(settings) == hash(Settings(retry_delays=(1, 2)))
