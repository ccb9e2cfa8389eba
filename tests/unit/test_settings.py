"""Settings from code and from the environment, refused when they can't work."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from outbox import Settings
from outbox.errors import InvalidSettings


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
        ({"immunity": "6"}, "immunity = '6' must be a finite number"),
        ({"immunity": 10**10}, "immunity = 10000000000 is more than"),
        ({"check_interval": 0}, "check_interval = 0 must be greater than 0"),
        ({"check_interval": -30}, "check_interval = -30 must be greater than 0"),
        ({"check_interval": 10**10}, "check_interval = 10000000000 is more than"),
        ({"max_checks": 0}, "max_checks = 0 must be greater than 0"),
        ({"max_checks": 15.0}, "max_checks = 15.0 must be int"),
        ({"max_checks": 2**31}, "max_checks = 2147483648 is more than 2147483647"),
        ({"check_timeout": 0}, "check_timeout = 0 must be greater than 0"),
        ({"check_time_limit": 0}, "check_time_limit = 0 must be greater than 0"),
        ({"check_time_limit": 86401}, "check_time_limit = 86401 is more than 86400"),
        ({"checks_in_flight": 0}, "checks_in_flight = 0 must be greater than 0"),
        ({"checks_in_flight": 1001}, "checks_in_flight = 1001 is more than 1000"),
        ({"check_batch": 0}, "check_batch = 0 must be greater than 0"),
        ({"check_batch": 1001}, "check_batch = 1001 is more than 1000"),
        ({"max_undecided": -1}, "max_undecided = -1 must not be negative"),
        ({"max_undispatched": -1}, "max_undispatched = -1 must not be negative"),
        ({"max_undispatched": 1.5}, "max_undispatched = 1.5 must be int"),
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


def test_defaults_of_the_check_are_rocketmqs() -> None:
    """Six seconds, thirty seconds, fifteen checks, sixty seconds, five threads: as BrokerConfig has them."""
    settings = Settings()
    assert (settings.immunity, settings.check_interval, settings.max_checks) == (6, 30, 15)
    assert (settings.check_time_limit, settings.checks_in_flight) == (60, 5)
    assert (settings.max_undecided, settings.max_undispatched) == (0, 0)


def test_checker_must_end_within_a_pass() -> None:
    """A checker may not take longer than a pass; the error says what to set."""
    assert Settings(check_timeout=60, check_time_limit=60).check_timeout == 60
    with pytest.raises(
        InvalidSettings,
        match=r"check_timeout = 61 s is longer than a pass may take \(check_time_limit = 60.0 s\).*to at least 61",
    ):
        Settings(check_timeout=61)
    with pytest.raises(InvalidSettings, match=r"check_timeout = 10\.0 s is longer"):
        Settings.from_env({"OUTBOX_CHECK_TIME_LIMIT": "5"})


def test_immunity_may_be_longer_than_all_checks() -> None:
    """How long a half is left alone says nothing of how often its checker is asked afterwards."""
    assert Settings(immunity=10 * 15 * 30).immunity == 4500
    assert Settings(immunity=0).immunity == 0


def test_settings_of_the_check_from_the_environment() -> None:
    """Seconds and counts are read as such; what contradicts is refused there as well."""
    environ = {"OUTBOX_IMMUNITY": "0.5", "OUTBOX_CHECK_INTERVAL": "2", "OUTBOX_MAX_CHECKS": "3"}
    settings = Settings.from_env(environ | {"OUTBOX_MAX_UNDECIDED": "7"})
    assert (settings.immunity, settings.check_interval, settings.max_checks) == (0.5, 2.0, 3)
    assert settings.max_undecided == 7
    for name, text in (("MAX_CHECKS", "29*1000"), ("IMMUNITY", "6s"), ("CHECKS_IN_FLIGHT", "5.0")):
        with pytest.raises(InvalidSettings, match=f"OUTBOX_{name}='{re.escape(text)}' can't be read"):
            Settings.from_env({f"OUTBOX_{name}": text})


def test_no_retries_at_all() -> None:
    """An empty retry table is a choice: the first failure parks."""
    assert Settings(retry_delays=()).retry_delays == ()
    assert Settings.from_env({"OUTBOX_RETRY_DELAYS": ""}).retry_delays == ()


def test_lists_become_tuples_of_seconds() -> None:
    """Retry delays may be given as a list; a set of settings stays hashable."""
    settings = Settings(retry_delays=[1, 2])  # type: ignore[arg-type]
    assert settings.retry_delays == (1, 2)
    assert hash(settings) == hash(Settings(retry_delays=(1, 2)))
