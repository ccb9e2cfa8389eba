"""A reconciliation as a file: what is read, what is refused, and what a command line puts in its place."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from outbox import Settings
from outbox.errors import InvalidSettings
from outbox.reconcile.config import access_of, job_of, merged, read_file, read_mapping
from outbox.reconcile.job import Access, Effect, EngineName, Job, Outcome, Pair, Repair, Spark, Tier, Window
from outbox.reconcile.measure import Measure

WHOLE = """
tier = "digest"
engine = "local"
apply = true
record = false
keep_for = "2d"
workers = 4
actor = "night"
max_resends = 5
max_findings = 500

[producer]
url = "postgresql://auditor@a.example/bank_a"
schema = "messages"

[consumer]
url_env = "BANK_B"

[[pair]]
topic = "transfer"
group = "bank-b"
tags = ["large"]
keys = ["DE*"]
headers = ["region=eu"]
effect = "books.ledger.message_id"

[window]
since = 2026-03-01T00:00:00+01:00
until = "2026-03-02T00:00:00+01:00"
grace = "1m30s"

[policy]
missing = "alert"
parked = "retry"

[[measure]]
name = "debited"
by = ["receiver"]
values = ["amount"]
producer = "SELECT receiver, amount FROM debit"
consumer = "SELECT receiver, amount FROM credit"
in_flight = { receiver = "receiver", amount = "amount" }

[spark]
max_wait = "1m"
conf = { "spark.executor.memory" = "1g" }
"""
ENVIRON = {"BANK_B": "postgresql+psycopg://auditor:secret@b.example/bank_b"}
LEAST: dict[str, Any] = {
    "producer": {"url": "postgresql://a/a"},
    "consumer": {"url": "postgresql://b/b"},
    "pair": [{"topic": "t", "group": "g"}],
}


def write(folder: Path, text: str) -> Path:
    """Write a file, and return its path."""
    path = folder / "night.toml"
    path.write_text(text, "utf-8")
    return path


def at(day: int) -> dt.datetime:
    """Return a midnight of March 2026."""
    return dt.datetime(2026, 3, day, tzinfo=dt.timezone(dt.timedelta(hours=1)))


def test_a_file_with_everything_in_it(tmp_path: Path) -> None:
    """Every key ends up in the job, with its type."""
    pair = Pair("transfer", "bank-b", {"large"}, {"DE*"}, Effect("books.ledger", "message_id"), {"region=eu"})
    assert job_of(read_file(write(tmp_path, WHOLE), ENVIRON)) == Job(
        producer=Access("postgresql+psycopg://auditor@a.example/bank_a", Settings(schema="messages")),
        consumer=Access("postgresql+psycopg://auditor:secret@b.example/bank_b", Settings()),
        pairs=(pair,),
        window=Window(at(1), at(2), 90.0),
        tier=Tier.DIGEST,
        engine=EngineName.LOCAL,
        measures=(
            Measure(
                name="debited",
                topic="transfer",
                group="bank-b",
                by=("receiver",),
                values=("amount",),
                producer="SELECT receiver, amount FROM debit",
                consumer="SELECT receiver, amount FROM credit",
                in_flight={"receiver": "receiver", "amount": "amount"},
            ),
        ),
        policy={Outcome.MISSING: Repair.ALERT, Outcome.PARKED: Repair.RETRY},
        max_resends=5,
        max_findings=500,
        apply=True,
        record=False,
        keep_for=2 * 86400.0,
        workers=4,
        actor="night",
        spark=Spark({"spark.executor.memory": "1g"}, 60.0),
    )


def test_a_file_with_little_in_it() -> None:
    """What isn't said is as it is in a job without a file."""
    assert job_of(read_mapping(LEAST)) == Job(
        Access("postgresql+psycopg://a/a", Settings()),
        Access("postgresql+psycopg://b/b", Settings()),
        (Pair("t", "g"),),
    )


@pytest.mark.parametrize(
    "url", ["postgresql://me:pa%40ss@a/a", "postgresql://a/a?password=pa%40ss", "postgresql://me:pa%40ss@a"]
)
def test_a_password_in_the_file_is_refused_and_not_repeated(url: str) -> None:
    """The error says where a password may be, and doesn't show the one it found."""
    with pytest.raises(InvalidSettings) as refused:
        read_mapping(LEAST | {"producer": {"url": url}})
    assert str(refused.value) == (
        "producer.url has a password, and a file can't keep it secret; leave it out and put it into PGPASSFILE, "
        "or write url_env = the name of an environment variable that has the whole URL"
    )


@pytest.mark.parametrize(
    "url", ["", "pa:ss", "mysql://me:pa@ss/a", "postgresql+psycopg2://me:pa@ss/a", "postgresql://me:pa@ss:port/a"]
)
def test_what_is_no_url_is_refused_and_not_repeated(url: str) -> None:
    """Whatever stands where a URL should be may hold a password."""
    with pytest.raises(InvalidSettings, match="BANK") as refused:
        access_of(url, what="BANK")
    assert "pa" not in str(refused.value).replace("password", "")


def test_an_access_shows_no_password() -> None:
    """The job of a file can be printed."""
    values = read_mapping(LEAST | {"consumer": {"url_env": "BANK_B"}}, environ=ENVIRON)
    assert "secret" not in repr(values)
    assert "secret" not in repr(job_of(values))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"teir": "full"}, "teir is unknown; did you mean tier?"),
        ({"tier": "half"}, "tier = 'half' must be one of auto, digest, full"),
        ({"engine": 3}, "engine = 3 must be one of auto, local, spark"),
        ({"workers": True}, "workers = True must be a whole number"),
        ({"workers": "2"}, "workers = '2' must be a whole number"),
        ({"workers": 0}, "workers = 0 must be at least 1"),
        ({"apply": "yes"}, "apply = 'yes' must be true or false"),
        (
            {"keep_for": "soon"},
            "keep_for = 'soon' must be a duration: 0 seconds or more, or a text such as '250ms', '1h30m' or '7d'",
        ),
        ({"keep_for": -1}, "keep_for = -1 must be a duration"),
        ({"keep_for": float("nan")}, "keep_for = nan must be a duration"),
        ({"producer": {}}, "producer.url: give either url or url_env, the name of an environment variable"),
        ({"producer": {"url": "postgresql://a/a", "url_env": "A"}}, "producer.url: give either url or url_env"),
        ({"producer": {"url_env": "NOWHERE"}}, "producer.url_env: the environment variable NOWHERE isn't set"),
        (
            {"producer": {"url": "postgresql://a/a", "password": "x"}},
            "producer.password is unknown; known are url, url_env, schema",
        ),
        ({"producer": {"url": "postgresql://a/a", "schema": "A-B"}}, "schema 'A-B' must match"),
        ({"producer": None}, "no producer: give the URL of its database"),
        ({"pair": []}, "nothing to reconcile: name a topic and a group"),
        ({"pair": {"topic": "t"}}, "pair = {'topic': 't'} must be a list, each of it a table"),
        ({"pair": ["t"]}, "pair[1] = 't' must be a table"),
        ({"pair": [{"topic": "t"}]}, "pair[1].group is missing; it must be a text"),
        ({"pair": [{"topic": "t t", "group": "g"}]}, "topic 't t' may only have the characters"),
        ({"pair": [{"topic": "t", "group": "g"}] * 2}, "a topic and group is named twice"),
        (
            {"pair": [{"topic": "t", "group": "g", "effect": "a.b.c.d"}]},
            "pair[1].effect = 'a.b.c.d' must be table.column",
        ),
        ({"window": {"since": "2026-03-01"}}, "window.since = '2026-03-01' must be a time with a zone"),
        ({"window": {"since": dt.date(2026, 3, 1)}}, "window.since = 2026-03-01 must be a time with a zone, such as"),
        ({"window": {"since": at(2), "until": at(1)}}, "since = 2026-03-02T00:00:00+01:00 must be before until"),
        ({"window": {"since": at(2), "last": "24h"}}, "since and last exclude each other"),
        ({"window": {"first": at(2)}}, "window.first is unknown"),
        ({"policy": {"mising": "resend"}}, "policy.mising is unknown; did you mean missing?"),
        ({"policy": {"missing": "delete"}}, "policy.missing = 'delete' must be one of alert, resend"),
        ({"policy": {"missing": "park"}}, "'park' can't mend missing; choose one of resend, alert"),
        ({"max_resends": -1}, "max_resends = -1 must be at least 0"),
        ({"max_findings": 3}, "max_findings = 3 must be at least 19"),
        ({"measure": [{"name": "m", "values": ["n"]}]}, "measure[1].consumer is missing"),
        (
            {"measure": [{"name": "m", "values": ["n"], "consumer": "SELECT 1", "in_flight": {"n": 1}}]},
            "measure[1].in_flight.n = 1 must be a text",
        ),
        (
            {"measure": [{"name": "m", "values": ["n"], "consumer": "DROP TABLE x"}]},
            "measure 'm': consumer must be a single SELECT",
        ),
        ({"spark": {"memory": "1g"}}, "spark.memory is unknown"),
    ],
)
def test_what_cant_be_right_is_refused(changes: dict[str, Any], why: str) -> None:
    """The error names the key, the value, and what may stand there."""
    document = {key: value for key, value in (LEAST | changes).items() if value is not None}
    with pytest.raises(ValueError) as refused:
        job_of(read_mapping(document), lambda _: at(3))
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("tier = ", "is no TOML: Invalid value (at end of document)"),
        ("teir = 'full'", "teir is unknown; did you mean tier?"),
        ("[[pair]]\ntopic = 't t'\ngroup = 'g'", "topic 't t' may only have the characters"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, content: str, why: str) -> None:
    """Whoever reads the error of a nightly job sees which file it is about."""
    path = write(tmp_path, content)
    with pytest.raises(InvalidSettings) as refused:
        read_file(path)
    assert str(refused.value).startswith(f"{path}")
    assert why in str(refused.value)


def test_a_file_that_isnt_there(tmp_path: Path) -> None:
    """The error says so, and which one."""
    with pytest.raises(InvalidSettings, match=r"nowhere\.toml can't be read: No such file"):
        read_file(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidSettings, match=r"binary\.toml is no TOML: 'utf-8' codec"):
        read_file(tmp_path / "binary.toml")


def test_measures_find_their_pair() -> None:
    """With one pair a measure is of that pair; with several it must say of which."""
    measure = {"name": "m", "values": ["n"], "consumer": "SELECT 1 AS n", "producer": "SELECT 1 AS n"}
    (found,) = read_mapping(LEAST | {"measure": [measure]})["measures"]
    assert (found.topic, found.group) == ("t", "g")
    two = LEAST | {"pair": [{"topic": "t", "group": "g"}, {"topic": "t", "group": "h"}]}
    with pytest.raises(InvalidSettings, match=r"measure\[1\]\.topic: name the topic and group"):
        read_mapping(two | {"measure": [measure]})
    (found,) = read_mapping(two | {"measure": [measure | {"topic": "t", "group": "h"}]})["measures"]
    assert (found.topic, found.group) == ("t", "h")


def test_a_command_line_counts_more_than_a_file() -> None:
    """What is said twice is taken from the command line, and the rest from the file."""
    file = read_mapping({"tier": "full", "workers": 4, "policy": {"missing": "alert", "parked": "retry"}})
    line = read_mapping({"tier": "auto", "apply": True, "policy": {"missing": "resend"}, "spark": {"max_wait": 60}})
    assert merged(file, line) == {
        "tier": Tier.AUTO,
        "workers": 4,
        "apply": True,
        "policy": {Outcome.MISSING: Repair.RESEND, Outcome.PARKED: Repair.RETRY},
        "spark": {"max_wait": 60.0},
    }
    assert merged(file, {}) == file
    spark = merged({"spark": {"conf": {"a": "b"}, "max_wait": 5.0}}, line)["spark"]
    assert spark == {"conf": {"a": "b"}, "max_wait": 60.0}


def test_since_and_last_take_each_others_place() -> None:
    """A command line that says one of them doesn't contradict a file that says the other."""
    last = {"window": {"last": 3600.0, "until": at(5), "grace": 1.0}}
    since = {"window": {"since": at(1)}}
    assert merged(last, since) == {"window": {"since": at(1), "until": at(5), "grace": 1.0}}
    assert merged(since, last) == last
    assert merged(last, {"window": {"grace": 2.0}}) == {"window": {"last": 3600.0, "until": at(5), "grace": 2.0}}


def test_a_command_line_chooses_among_the_pairs_of_a_file() -> None:
    """A pair that the file knows keeps its filter and effect; measures of the others go with them."""
    known, other = Pair("t", "g", {"a"}, None, Effect("ledger")), Pair("t", "h")
    measures = tuple(
        Measure(f"m{pair.group}", "t", pair.group, (), ("n",), "SELECT 1", producer="SELECT 1")
        for pair in (known, other)
    )
    file = {"pairs": (known, other), "measures": measures}
    assert merged(file, {"pairs": (Pair("t", "g"),)}) == {"pairs": (known,), "measures": measures[:1]}
    chosen = merged(file, {"pairs": (Pair("t", "g", {"b"}), Pair("u", "g"))})
    assert chosen["pairs"] == (Pair("t", "g", {"b"}, None, Effect("ledger")), Pair("u", "g"))


def test_the_last_hours_end_at_the_clock_of_the_producers_database(url: str) -> None:
    """No decision depends on this host's time."""
    engine = create_engine(url)
    access = access_of(url)
    values = {"producer": access, "consumer": access, "pairs": (Pair("t", "g"),), "window": {"last": 3600.0}}
    with engine.connect() as connection:
        clock = text("SELECT clock_timestamp() - interval '1 hour'")
        before = connection.scalar(clock)
        window = job_of(values).window
        after = connection.scalar(clock)
    engine.dispose()
    assert before is not None and window.since is not None and after is not None
    assert before <= window.since <= after
    assert window.until is None


def test_the_last_hours_before_a_given_end() -> None:
    """With an end nobody need be asked for the time."""
    values = read_mapping(LEAST | {"window": {"last": "24h", "until": at(3)}})
    assert job_of(values).window == Window(at(2), at(3))


def test_a_mapping_in_code_is_read_like_a_file() -> None:
    """What a file has as text may be an object in code; both are the same."""
    written = {"tier": "full", "window": {"since": "2026-03-01T00:00:00+01:00", "grace": "90s"}, "pair": LEAST["pair"]}
    in_code = {
        "tier": Tier.FULL,
        "window": {"since": at(1), "grace": dt.timedelta(seconds=90)},
        "pairs": [Pair("t", "g")],
    }
    assert read_mapping(written) == read_mapping(in_code)
    assert read_mapping({"policy": {Outcome.PARKED: Repair.RETRY}}) == read_mapping({"policy": {"parked": "retry"}})


def test_commands_and_workers_start_without_the_extra() -> None:
    """What names a job or shows the record needs neither Arrow nor NumPy: a light install has the other commands."""
    program = (
        "import sys; sys.modules['numpy'] = sys.modules['pyarrow'] = None\n"
        "import outbox.cli, outbox.worker.worker, outbox.reconcile.duty.reconciliation, outbox.reconcile.config"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
