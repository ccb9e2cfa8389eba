"""Settings from code and from the environment, refused when they can't work."""

from __future__ import annotations

import ast
import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import outbox
from outbox import Settings
from outbox.errors import InvalidSettings
from outbox.reader import shape_of


def test_defaults_agree() -> None:
    """The defaults contradict nothing, keep 72 hours, and are the same from an empty environment."""
    assert Settings.from_env({}) == Settings()
    assert Settings().retention == 72 * 3600
    assert len(Settings().retry_delays) == 16


def test_settings_are_frozen() -> None:
    """What was checked can't be changed afterwards."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().queues = 1  # type: ignore[misc]


def test_every_setting_can_come_from_the_environment() -> None:
    """Each field has a variable OUTBOX_<NAME>, read as the field's type."""
    wrong = {}
    for field in dataclasses.fields(Settings):
        default = getattr(Settings(), field.name)
        text = ",".join(str(part) for part in default) if isinstance(default, tuple) else str(default)
        value = getattr(Settings.from_env({f"OUTBOX_{field.name.upper()}": text}), field.name)
        typed = isinstance(value, int) if isinstance(default, int) else type(value) is type(default)
        if value != default or not typed:
            wrong[field.name] = value
    assert wrong == {}


def test_environment_and_overrides() -> None:
    """Overrides in code win over variables; other variables are ignored."""
    environ = {"OUTBOX_SCHEMA": "mine", "OUTBOX_QUEUES": "4", "OUTBOX_LISTEN": "off", "OUTBOX_RETRY_DELAYS": "1, 2.5,"}
    settings = Settings.from_env(environ | {"OUTBOX_DATABASE_URL": "x", "QUEUES": "9"}, queues=2, schema=None)
    assert (settings.schema, settings.queues, settings.listen) == ("mine", 2, False)
    assert settings.retry_delays == (1.0, 2.5)


def test_durations_have_units() -> None:
    """A duration is a number of seconds, or a text with units."""
    settings = Settings.from_env(
        {"OUTBOX_RETENTION": "3d", "OUTBOX_INBOX_RETENTION": "1w", "OUTBOX_RETRY_DELAYS": "5s,1m30s"}
    )
    assert (settings.retention, settings.retry_delays) == (3 * 86400.0, (5.0, 90.0))


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("no", False), ("Off", False), ("yes", True)])
def test_booleans(text: str, value: bool) -> None:
    """The usual spellings of yes and no are understood."""
    assert Settings.from_env({"OUTBOX_LISTEN": text}).listen is value


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("OUTBOX_QUEUES", "eight", "OUTBOX_QUEUES = 'eight' must be a whole number"),
        ("OUTBOX_QUEUES", "", "OUTBOX_QUEUES = '' must be a whole number"),
        ("OUTBOX_QUEUES", "2.5", "OUTBOX_QUEUES = '2.5' must be a whole number"),
        (
            "OUTBOX_RETENTION",
            "72 h",
            "OUTBOX_RETENTION = '72 h' must be a duration: 0 seconds or more, or a text such as",
        ),
        ("OUTBOX_LISTEN", "maybe", "OUTBOX_LISTEN = 'maybe' must be true or false"),
        ("OUTBOX_RETRY_DELAYS", "1;2", "OUTBOX_RETRY_DELAYS\\[1\\] = '1;2' must be a duration"),
        ("OUTBOX_QUEUES", "0", "OUTBOX_QUEUES = '0' must be from 1 to 4096"),
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
        ({"queues": 0}, "queues = 0 must be from 1 to 4096"),
        ({"queues": 4097}, "queues = 4097 must be from 1 to 4096"),
        ({"queues": 2.5}, "queues = 2.5 must be a whole number"),
        ({"queues": "8"}, "queues = '8' must be a whole number"),
        ({"queues": True}, "queues = True must be a whole number"),
        ({"max_body_bytes": -1}, "max_body_bytes = -1 must be greater"),
        ({"dispatch_batch": 0}, "dispatch_batch = 0"),
        ({"idle_wait": 0}, "idle_wait = 0"),
        ({"retention": math.nan}, "retention = nan"),
        ({"retention": math.inf}, "retention = inf"),
        ({"immunity": -1}, "immunity = -1 must be a duration: 0 seconds or more"),
        ({"immunity": math.nan}, "immunity = nan"),
        ({"drain_timeout": math.inf}, "drain_timeout = inf"),
        ({"retry_jitter": 1}, "retry_jitter = 1 must be at least 0 and less than 1"),
        ({"retry_jitter": -0.1}, "retry_jitter = -0.1"),
        ({"retry_delays": (1, -1)}, r"retry_delays\[2\] = -1 must be a duration: 0 seconds or more"),
        ({"retry_delays": (1, math.nan)}, "retry_delays"),
        ({"retry_delays": (1, "2")}, "retry_delays"),
        ({"retry_delays": 5}, "retry_delays = 5 must be"),
        ({"delay_levels": (1, -1)}, r"delay_levels\[2\] = -1 must be a duration: 0 seconds or more"),
        ({"delay_levels": (1, 1e300)}, r"delay_levels\[2\] = 1e\+300 must be at most"),
        ({"delay_levels": ()}, "delay_levels is empty; give the delay of level 1 at least"),
        ({"listen": "no"}, "listen = 'no' must be true or false"),
        ({"immunity": "6"}, "immunity = '6' must be a duration"),
        ({"immunity": 10**10}, "immunity = 10000000000 must be from 0 to 3162239999"),
        ({"check_interval": 0}, "check_interval = 0 must be greater than 0 and at most 3162239999"),
        ({"check_interval": -30}, "check_interval = -30 must be a duration: 0 seconds or more"),
        ({"check_interval": 10**10}, "check_interval = 10000000000 must be greater than 0 and at most 3162239999"),
        ({"max_checks": 0}, "max_checks = 0 must be from 1 to 2147483647"),
        ({"max_checks": 15.0}, "max_checks = 15.0 must be a whole number"),
        ({"max_checks": 2**31}, "max_checks = 2147483648 must be from 1 to 2147483647"),
        ({"check_timeout": 0}, "check_timeout = 0 must be greater than 0"),
        ({"check_time_limit": 0}, "check_time_limit = 0 must be greater than 0 and at most 86400"),
        ({"check_time_limit": 86401}, "check_time_limit = 86401 must be greater than 0 and at most 86400"),
        ({"checks_in_flight": 0}, "checks_in_flight = 0 must be from 1 to 1000"),
        ({"checks_in_flight": 1001}, "checks_in_flight = 1001 must be from 1 to 1000"),
        ({"check_batch": 0}, "check_batch = 0 must be from 1 to 1000"),
        ({"check_batch": 1001}, "check_batch = 1001 must be from 1 to 1000"),
        ({"max_undecided": -1}, "max_undecided = -1 must be at least 0"),
        ({"max_undispatched": -1}, "max_undispatched = -1 must be at least 0"),
        ({"max_undispatched": 1.5}, "max_undispatched = 1.5 must be a whole number"),
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


def test_what_is_undelivered_is_kept_for_longer() -> None:
    """Not for less than what all groups have consumed; 0 makes no difference between them."""
    assert Settings().undelivered_retention == 0
    Settings(retention=100, inbox_retention=10**6, undelivered_retention=100)
    with pytest.raises(
        InvalidSettings,
        match=r"undelivered_retention = 99 s is shorter than retention \(100 s\).*at least 100, or to 0",
    ):
        Settings(retention=100, inbox_retention=10**6, undelivered_retention=99)


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
    for name, text in (("MAX_CHECKS", "29*1000"), ("IMMUNITY", "6 s"), ("CHECKS_IN_FLIGHT", "5.0")):
        with pytest.raises(InvalidSettings, match=f"OUTBOX_{name} = '{re.escape(text)}' must be"):
            Settings.from_env({f"OUTBOX_{name}": text})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("OUTBOX_RETENTON", "OUTBOX_RETENTON is unknown; did you mean OUTBOX_RETENTION?"),
        ("OUTBOX_RETENTIONS", "did you mean OUTBOX_RETENTION?"),
        ("OUTBOX_DISPATCHBATCH", "did you mean OUTBOX_DISPATCH_BATCH?"),
        ("OUTBOX_XYZ", "OUTBOX_XYZ is unknown; known are OUTBOX_QUEUES, OUTBOX_MAX_BODY_BYTES"),
    ],
)
def test_misspelt_variables_are_refused(name: str, said: str) -> None:
    """A variable that nothing reads isn't ignored in silence: the error has the nearest name."""
    with pytest.raises(InvalidSettings, match=re.escape(said)):
        Settings.from_env({name: "1"})


@pytest.mark.parametrize(
    "name",
    [
        *("OUTBOX_DATABASE_URL", "OUTBOX_PRODUCER_URL", "OUTBOX_CONSUMER_URL", "OUTBOX_RECORD_URL", "OUTBOX_APP"),
        "OUTBOX_PROCESSES",
        "OUTBOX_PG_BIN",
        *("OUTBOX_CONSOLE_PORT", "OUTBOX_TEST_BROWSER", "OUTBOX_BENCH_SIZES", "OUTBOX", "MY_OUTBOX_X"),
        *("OUTBOX_SERVICE_HOST", "OUTBOX_PORT", "OUTBOX_PORT_5432_TCP_ADDR", "OUTBOX_WORKER_SERVICE_PORT_HTTP"),
    ],
)
def test_variables_of_others_are_left_alone(name: str) -> None:
    """What the commands, the console, the tests or Kubernetes read or set is no misspelt setting."""
    assert Settings.from_env({name: "tcp://10.0.0.1:5432"}) == Settings()


def test_help_does_not_show_the_environment() -> None:
    """Documentation of the settings is printed and published; the process environment has passwords."""
    program = "from outbox import Settings; import pydoc; print(pydoc.plaintext.document(Settings))"
    environ = {**os.environ, "SOME_PASSWORD": "hunter2-in-the-environment"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert "from_env" in done.stdout
    assert "hunter2" not in done.stdout


def test_no_signature_holds_the_environment() -> None:
    """The default of a parameter is what help() prints: none of the package's is the environment."""
    package = Path(outbox.__file__).parent
    defaults = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.arguments)
        for default in (*node.defaults, *node.kw_defaults)
        if default is not None and ast.unparse(default) == "os.environ"
    ]
    assert not defaults


def test_every_setting_says_what_it_is_for() -> None:
    """The reference is made from the fields: each has a sentence and the page of the guide that explains it."""
    for shape in shape_of(Settings):
        assert shape.option.help.endswith("."), shape.name
        assert shape.option.page in {"sending", "checking", "consuming", "delivering", "deploying", "reconciling"}, (
            shape.name
        )


def test_no_retries_at_all() -> None:
    """An empty retry table is a choice: the first failure parks."""
    assert Settings(retry_delays=()).retry_delays == ()
    assert Settings.from_env({"OUTBOX_RETRY_DELAYS": ""}).retry_delays == ()


def test_lists_become_tuples_of_seconds() -> None:
    """Retry delays may be given as a list; a set of settings stays hashable."""
    settings = Settings(retry_delays=[1, 2])  # type: ignore[arg-type]
    assert settings.retry_delays == (1, 2)
    assert hash(settings) == hash(Settings(retry_delays=(1, 2)))
