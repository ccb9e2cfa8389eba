"""A fleet: its files, who its members are, how they are run within bounds, and what came of them."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox import Settings
from outbox.cli.output import Code
from outbox.errors import InvalidSettings, SourceError
from outbox.reconcile.fleet.config import Bounds, Fleet, PairPattern, read_fleet
from outbox.reconcile.fleet.members import Member, members_of
from outbox.reconcile.fleet.report import as_json, render_fleet
from outbox.reconcile.fleet.run import FleetResult, MemberResult, compare_fleet, in_turn, mend_fleet
from outbox.reconcile.fleet.totals import Double, TotalResult, TotalRow
from outbox.reconcile.job import Access, Interrupted, NoProgress, Outcome, Progress, Repair, Window
from outbox.reconcile.tables import InboxState
from tests.cli.conftest import run_cli
from tests.reconcile.test_report_html import Page
from tests.reconcile.town import IN_SYNC, Town, fate, kinds, url_of

MISSING = fate(status=InboxState.NONE)
JOB = {"window": {"grace": 60.0}}
#: What a `Barrier` or an event waits for at most (seconds): it is there at once unless something is broken.
PATIENCE = 60.0


@dataclass
class Houses:
    """Two shops that send, and two banks that take: each pair of them is a town of its own over the same databases."""

    settings: Settings
    databases: dict[str, Engine]
    towns: dict[tuple[str, str], Town]

    def fleet(self, *patterns: PairPattern, **bounds: float) -> Fleet:
        """Return a fleet of all four."""
        accesses = {name: Access(url_of(engine), self.settings) for name, engine in self.databases.items()}
        return Fleet(accesses, patterns or (PairPattern(),), JOB, Bounds(**bounds))  # type: ignore[arg-type]


@pytest.fixture
def houses(new_engine: Callable[[], Engine], settings: Settings) -> Iterator[Houses]:
    """Four databases with messages in sync: each shop's topic is read by a group of its name in each bank."""
    engines = {name: new_engine() for name in ("shop-1", "shop-2", "bank-1", "bank-2")}
    with ExitStack() as stack:
        towns = {
            (shop, bank): stack.enter_context(Town(engines[shop], engines[bank], settings))
            for shop, bank in (("shop-1", "bank-1"), ("shop-2", "bank-2"))
        }
        for (shop, bank), town in towns.items():
            town.plant([IN_SYNC] * 3, topic=f"{shop}-orders", group=f"{bank}-books")
        yield Houses(settings, engines, towns)


def names(result: FleetResult) -> set[tuple[str, str]]:
    """Return which databases were compared."""
    return {(each.member.producer, each.member.consumer) for each in result.members}


def test_members_are_found_by_what_the_databases_know(houses: Houses) -> None:
    """Without a pattern all is compared that is there, and nothing else."""
    result = compare_fleet(houses.fleet())
    assert names(result) == {("shop-1", "bank-1"), ("shop-2", "bank-2")}
    assert [each.result.in_sync for each in result.members if each.result] == [True, True]
    assert as_json(result)["verdict"] == "in sync"


def test_patterns_choose_and_priorities_order(houses: Houses) -> None:
    """Topics and groups may have the names of the databases in them; what is more important comes first."""
    fleet = houses.fleet(
        PairPattern(producers=("shop-1",), topics=("{producer}-*",), groups=("{consumer}-books",)),
        PairPattern(producers=("shop-2",), topics=("shop-?-orders",), priority=5),
    )
    members = members_of(fleet, NoProgress()).members
    assert [(each.producer, each.priority) for each in members] == [("shop-2", 5), ("shop-1", 0)]
    assert [str(pair) for pair in members[1].job.pairs] == ["shop-1-orders → bank-1-books"]


def test_a_group_that_never_came_is_compared_where_it_is_named(houses: Houses) -> None:
    """A pattern finds what is there, and a name what should be."""
    named = PairPattern(producers=("shop-1",), consumers=("bank-2",), topics=("shop-1-orders",), groups=("new",))
    (only,) = compare_fleet(houses.fleet(named)).members
    assert only.result is not None
    assert only.result.pairs[0].differences == {Outcome.UNCONSUMED: 3}


def test_what_chooses_nothing_is_refused(houses: Houses) -> None:
    """A slip in a pattern must not look like a fleet in sync."""
    with pytest.raises(InvalidSettings, match=r"compare\[2\] chooses nothing: no producer like shop-\*"):
        compare_fleet(houses.fleet(PairPattern(), PairPattern(producers=("shop-*",), topics=("ordres",))))


def test_a_topic_of_two_producers_is_refused(houses: Houses) -> None:
    """A group reads a topic from one database: which one, the patterns must say."""
    houses.towns["shop-2", "bank-2"].plant([IN_SYNC], topic="shop-1-orders", group="bank-2-books")
    with pytest.raises(InvalidSettings, match="both shop-1 and shop-2 have the topic 'shop-1-orders'"):
        compare_fleet(houses.fleet())
    narrow = PairPattern(topics=("{producer}-orders",), groups=("*-books",))
    assert names(compare_fleet(houses.fleet(narrow))) == {
        ("shop-1", "bank-1"),
        ("shop-1", "bank-2"),
        ("shop-2", "bank-2"),
    }


def test_a_database_that_is_away_ends_nothing_but_its_own(houses: Houses) -> None:
    """The others are compared, and the result says which wasn't."""
    fleet = houses.fleet()
    gone = Access("postgresql+psycopg://nobody:s3cret@127.0.0.1:1/none", houses.settings)
    result = compare_fleet(replace(fleet, databases={**fleet.databases, "shop-2": gone}))
    assert names(result) == {("shop-1", "bank-1")}
    assert result.failed == 1
    assert "s3cret" not in str(result.unreachable)
    assert as_json(result)["in_sync"] is False


def test_differences_are_found_and_repaired(houses: Houses) -> None:
    """Each member has a report and a record of its own, as if it had been compared alone."""
    town = houses.towns["shop-1", "bank-1"]
    (lost,) = town.plant([MISSING], topic="shop-1-orders", group="bank-1-books")
    fleet = houses.fleet()
    result = compare_fleet(fleet)
    first = next(each.result for each in result.members if each.member.producer == "shop-1")
    assert first is not None
    assert kinds(first.pairs[0]) == {lost: Outcome.MISSING}
    assert town.rows("SELECT count(*) FROM outbox.reconciliation_run WHERE finished_at IS NOT NULL") == [1]
    mend_fleet(fleet, result)
    assert [each.result for each in first.pairs[0].repairs] == ["done"]
    assert [each.action for each in first.pairs[0].repairs] == [Repair.RESEND]


def test_what_goes_wrong_over_a_repair_is_told(houses: Houses) -> None:
    """The comparison has a result, and the repair didn't come to its end: both are told."""
    houses.towns["shop-1", "bank-1"].plant([MISSING], topic="shop-1-orders", group="bank-1-books")
    fleet = houses.fleet()
    result = compare_fleet(fleet)
    houses.towns["shop-1", "bank-1"].at_producer("ALTER TABLE {s}.message RENAME TO mislaid")
    mend_fleet(fleet, result)
    assert result.failed == 1
    assert "came to no result, or not to its end; of the others: 1 difference left" in result.sentence


def test_a_part_of_a_fleet_is_compared_alone(houses: Houses) -> None:
    """The other patterns may choose nothing of it; what is between no two databases is refused."""
    fleet = houses.fleet(PairPattern(topics=("shop-1-*",)), PairPattern(topics=("shop-2-*",)))
    assert names(compare_fleet(replace(fleet, only=("*-1",)))) == {("shop-1", "bank-1")}
    with pytest.raises(InvalidSettings, match="between databases like shop-1, bank-2"):
        compare_fleet(replace(fleet, only=("shop-1", "bank-2")))


def test_one_group_in_two_databases_took_effect_twice(houses: Houses) -> None:
    """Each database is in sync with the producer; what both have booked is a difference of each, written down."""
    first = houses.towns["shop-1", "bank-1"]
    ids = first.plant([IN_SYNC] * 4, topic="shop-1-fees", group="fees")
    houses.towns["shop-2", "bank-2"].run("DROP TABLE ledger")
    with Town(houses.databases["shop-1"], houses.databases["bank-2"], houses.settings) as second:
        second.plant([fate(state=None)] * 4, topic="shop-1-fees", group="fees", ids=ids)
        fleet = houses.fleet(PairPattern(groups=("fees",)))
        result = compare_fleet(fleet)
        assert [(double.group, double.consumers, double.number) for double in result.doubles] == [
            ("fees", ("bank-1", "bank-2"), 4)
        ]
        for _, job in result.results:
            assert kinds(job.pairs[0]) == dict.fromkeys(ids, Outcome.DUPLICATE_EFFECT)
            assert job.pairs[0].counts == Counter({Outcome.DUPLICATE_EFFECT: 4})
        for town in (first, second):
            sql = "SELECT message_id FROM outbox.reconciliation_finding WHERE kind = 'duplicate_effect' ORDER BY 1"
            assert town.rows(sql) == sorted(ids)
        # Whom only one of them has is no double: a group may move from one database to another.
        second.forget(*ids[1:])
        second.run("DELETE FROM {s}.consumer_offset")
    after = compare_fleet(replace(fleet, patterns=(PairPattern(topics=("shop-1-fees",), groups=("fees",)),)))
    assert [double.number for double in after.doubles] == [1]


# --- in turn ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def members(houses: Houses) -> list[MemberResult]:
    """Six members over the same server."""
    some = members_of(houses.fleet(), NoProgress()).members
    return [MemberResult(some[0]) for _ in range(6)]


def server_and_sessions(member: Member) -> tuple[str, int]:
    """Return the only server of a member, and how many sessions it has there."""
    ((server, number),) = member.sessions.items()
    assert server == member.servers.of(member.job.producer)
    return server, number


def test_no_server_has_more_sessions_than_are_allowed(members: list[MemberResult]) -> None:
    """Two would run at once, and the sessions of the server are enough for one."""
    _, needs = server_and_sessions(members[0].member)
    guard, running, most = threading.Lock(), 0, 0

    def act(_: MemberResult, __: Progress) -> None:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        with guard:
            running -= 1

    in_turn(members, act, Bounds(at_once=4, sessions=2 * needs - 1), NoProgress())
    assert most == 1


def test_members_run_at_once(members: list[MemberResult]) -> None:
    """Where the sessions are enough for two, two are at work: each waits for another one here."""
    _, needs = server_and_sessions(members[0].member)
    both = threading.Barrier(2)

    def meet(_: MemberResult, __: Progress) -> None:
        both.wait(PATIENCE)

    in_turn(members, meet, Bounds(at_once=2, sessions=2 * needs), NoProgress())
    assert [each.error for each in members] == [""] * 6


def test_an_error_is_the_members_own(members: list[MemberResult]) -> None:
    """The others go on, and no password is in what is told."""
    password = members[0].member.job.producer.url

    def act(each: MemberResult, _: Progress) -> None:
        if each is members[1]:
            raise SourceError("the disk is full")
        if each is members[2]:
            raise ValueError(f"bad: {password}")

    in_turn(members, act, Bounds(), NoProgress())
    assert members[1].error.endswith("the disk is full")
    assert members[2].error.startswith("ValueError: bad")
    assert [each.error for each in (members[0], *members[3:])] == [""] * 4


def test_what_has_no_time_left_does_not_begin(members: list[MemberResult]) -> None:
    """It is told of each, and so it isn't taken for being in sync."""
    began: list[MemberResult] = []
    in_turn(members, lambda each, _: began.append(each), Bounds(max_time=1e-9), NoProgress())
    assert began == []
    assert all("max_time = " in each.error for each in members)


def test_whoever_ends_the_fleet_ends_the_members_at_work(members: list[MemberResult]) -> None:
    """Each of them hears of it at its next step."""
    ended: list[MemberResult] = []
    at_work = threading.Event()

    def act(each: MemberResult, progress: Progress) -> None:
        at_work.set()
        try:
            while True:
                progress.done(0)
        except Interrupted:
            ended.append(each)
            raise

    class Impatient(NoProgress):
        def done(self, steps: int) -> None:
            super().done(steps)
            assert at_work.wait(PATIENCE)
            raise Interrupted

    with pytest.raises(Interrupted):
        in_turn(members, act, Bounds(at_once=2, sessions=100), Impatient())
    assert ended == members[:2]


# --- files and the command -------------------------------------------------------------------------------------------


FILE = """
at_once = 2
jitter = "0s"
[[database]]
names = ["shop-1", "shop-2", "bank-1", "bank-2"]
url_env = "URL_OF_{NAME}"
[job.window]
grace = "1m"
[[compare]]
topics = ["{producer}-orders"]
effect = "ledger.message_id"
[[compare.measure]]
name = "n"
values = ["n"]
producer = "SELECT count(*) AS n FROM outbox.half_message"
consumer = "SELECT count(*) AS n FROM outbox.consumer_message"
in_flight = { n = "*" }
"""


@pytest.fixture
def fleet_file(houses: Houses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the fleet; the databases are in the environment."""
    for name, engine in houses.databases.items():
        monkeypatch.setenv(f"URL_OF_{name.upper().replace('-', '_')}", url_of(engine))
    for town in houses.towns.values():
        town.run("INSERT INTO ledger (message_id) SELECT message_id FROM {s}.consumer_message")
    path = tmp_path / "fleet.toml"
    path.write_text(FILE)
    return path


def test_the_command_compares_and_writes_one_file_of_gauges(fleet_file: Path, houses: Houses) -> None:
    """A row for each member on stdout; the exit code tells what came of all."""
    gauges, folder = fleet_file.parent / "fleet.prom", fleet_file.parent / "findings"
    page = fleet_file.parent / "fleet.html"
    options = ("--html", str(page), "--prometheus", str(gauges), "--findings", str(folder))
    well = run_cli("reconcile", "fleet", str(fleet_file), *options)
    assert well.code == Code.DONE, well.out + well.err
    assert "in sync" in well.out
    text = gauges.read_text()
    assert 'outbox_reconcile_success{group="bank-2-books",producer="shop-2"' in text.replace('consumer="bank-2",', "")
    assert 'measure="n"' in text
    assert "outbox_reconcile_fleet_failed 0.0" in text
    assert "shop-2 → bank-2" in page.read_text()
    assert len(list(folder.rglob("*.parquet"))) == 2

    houses.towns["shop-2", "bank-2"].plant([MISSING], topic="shop-2-orders", group="bank-2-books")
    differs = run_cli("reconcile", "fleet", str(fleet_file), "-o", "json")
    assert differs.code == Code.PROBLEMS
    found = {each["producer"]: each["report"]["differences"] for each in json.loads(differs.out)["members"]}
    assert found == {"shop-1": 0, "shop-2": 1}
    assert run_cli("reconcile", "fleet", str(fleet_file), "--only", "*-1").code == Code.DONE
    repaired = run_cli("reconcile", "fleet", str(fleet_file), "--apply", "--yes")
    assert repaired.code == Code.DONE
    assert "0 differences left, 1 of 1 repaired" in repaired.out.replace("no differences", "0 differences")


def test_the_environment_names_the_database_of_the_record(
    fleet_file: Path, houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a single job."""
    monkeypatch.setenv("OUTBOX_RECORD_URL", url_of(houses.databases["bank-2"]))
    assert run_cli("reconcile", "fleet", str(fleet_file)).code == Code.DONE
    count = "SELECT count(*) FROM outbox.reconciliation_run"
    assert {bank: houses.towns[shop, bank].rows(count) for shop, bank in houses.towns} == {"bank-1": [0], "bank-2": [2]}


def test_a_dry_run_names_the_members(fleet_file: Path, houses: Houses) -> None:
    """Nothing is compared and nothing recorded."""
    result = run_cli("reconcile", "fleet", str(fleet_file), "--dry-run", "-o", "json")
    assert result.code == Code.DONE
    rows = json.loads(result.out)["members"]
    assert [(row["producer"], row["consumer"], row["pairs"]) for row in rows] == [
        ("shop-1", "bank-1", "shop-1-orders → bank-1-books"),
        ("shop-2", "bank-2", "shop-2-orders → bank-2-books"),
    ]
    town = houses.towns["shop-1", "bank-1"]
    assert town.rows("SELECT count(*) FROM outbox.reconciliation_run") == [0]


def test_a_fleet_without_a_database_to_ask_has_no_result(fleet_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some away: done in part. All away: no result."""
    away = "postgresql+psycopg://x:s3cret@127.0.0.1:1/x"
    monkeypatch.setenv("URL_OF_BANK_2", away)
    gauges = fleet_file.parent / "fleet.prom"
    some = run_cli("reconcile", "fleet", str(fleet_file), "--prometheus", str(gauges))
    assert some.code == Code.PARTIAL
    # What is between databases that can't be asked isn't known: no other gauge would tell.
    assert "outbox_reconcile_fleet_failed 1.0" in gauges.read_text()
    for name in ("BANK_1", "SHOP_1", "SHOP_2"):
        monkeypatch.setenv(f"URL_OF_{name}", away)
    none = run_cli("reconcile", "fleet", str(fleet_file))
    assert none.code == Code.NO_RESULT
    assert "s3cret" not in some.out + some.err + none.out + none.err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no database; name them in tables"),
        ("[[database]]\nnames = ['a']\nurl = 'postgresql:///{name}'\n", "nothing to compare"),
        ("[[database]]\nurl = 'postgresql:///a'\n", r"database\[1\].names is missing"),
        ("[[database]]\nnames = ['a b']\nurl = 'postgresql:///a'\n", "'a b' must have letters"),
        ("[[database]]\nnames = ['a', 'a']\nurl = 'postgresql:///a'\n", "has 'a' twice"),
        ("[[database]]\nnames = ['a']\nurl = 'postgresql://u:pw@h/a'\n", r"database\[1\] a.url has a password"),
        ("[[database]]\nnames = ['a']\nurl_env = 'NO_{NAME}'\n", "the environment variable NO_A isn't set"),
        ("at_onse = 2\n", "at_onse is unknown; did you mean at_once"),
        ("at_once = 0\n", "at_once = 0 must be"),
        ("[job]\nproducer = 'x'\n", "job.producer: a fleet names it"),
        ("[[compare]]\ntopic = 'x'\n", r"compare\[1\].topic is unknown; did you mean compare\[1\].topics|topics"),
        ("[[compare]]\nfilters = {}\n", r"compare\[1\].filters is unknown"),
        ("compare = 3\n", r"compare must be tables, written \[\[compare\]\]"),
        (
            "[[database]]\nnames = ['a']\n[database.tables]\ntable = 'x'\ncolumns = { id = 'y' }\n",
            "write producer_table",
        ),
        (
            "[[database]]\nnames = ['a']\nurl = 'postgresql:///a'\n"
            "[database.producer_table]\nformat = 'parquet'\npath = '/lake/{name}'\ncolumns = { id = 'y', at = 'at' }\n",
            r"database\[1\] a: parquet /lake/a is read by Spark; leave the URL out",
        ),
    ],
)
def test_what_a_file_says_wrongly(tmp_path: Path, text: str, error: str) -> None:
    """The error names the file, the key and the mend."""
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(InvalidSettings, match=error) as raised:
        read_fleet(path)
    assert str(path) in str(raised.value)
    assert "pw" not in str(raised.value).replace("PGPASSFILE", "")


def test_a_folder_is_put_together(tmp_path: Path) -> None:
    """Each service has its own file; what only one can say is refused in a second."""
    with pytest.raises(InvalidSettings, match="has no file"):
        read_fleet(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(
            f"[[database]]\nnames = ['{name}']\nurl = 'postgresql:///{{name}}'\n[[compare]]\nproducers = ['{name}']\n"
        )
    (tmp_path / "run.toml").write_text("sessions = 4\n[job]\nmax_resends = 1\n")
    fleet = read_fleet(tmp_path)
    assert [*fleet.databases] == ["a", "b"]
    assert [each.producers for each in fleet.patterns] == [("a",), ("b",)]
    assert fleet.bounds.sessions == 4
    assert fleet.job == {"max_resends": 1}
    (tmp_path / "z.toml").write_text("sessions = 5\n")
    with pytest.raises(InvalidSettings, match="sessions is there in another file"):
        read_fleet(tmp_path)
    (tmp_path / "z.toml").write_text("[[database]]\nnames = ['a']\nurl = 'postgresql:///a'\n")
    with pytest.raises(InvalidSettings, match="'a', which is there already"):
        read_fleet(tmp_path)


def test_a_member_needs_no_more_sessions_than_are_allowed(houses: Houses) -> None:
    """It would never begin: the error comes before anything is read."""
    with pytest.raises(InvalidSettings, match=r"needs 8 sessions on .*, and sessions = 7; allow more"):
        compare_fleet(houses.fleet(sessions=7))


def test_two_names_of_a_server_are_one_server(houses: Houses) -> None:
    """The server says which it is, so that the bound holds; what it is called is how it was met first."""
    fleet = houses.fleet(sessions=7)
    other = {
        name: Access(access.url.replace("127.0.0.1", "localhost"), access.settings)
        for name, access in fleet.databases.items()
        if name.startswith("bank")
    }
    assert all("localhost" in each.url for each in other.values())
    with pytest.raises(InvalidSettings, match=r"needs 8 sessions on 127.0.0.1:\d+, and sessions = 7"):
        members_of(replace(fleet, databases={**fleet.databases, **other}), NoProgress())


def test_a_window_of_the_last_hours_ends_by_the_producers_clock(houses: Houses) -> None:
    """Each database says what time it is."""
    fleet = replace(houses.fleet(), job={"window": {"last": 3600.0}})
    (window,) = {each.job.window for each in members_of(fleet, NoProgress()).members[:1]}
    assert isinstance(window, Window)
    assert window.since is not None


def test_the_page_tells_the_whole(houses: Houses) -> None:
    """Databases, differences, what came to no result, doubles and totals; each text stays text."""
    (lost,) = houses.towns["shop-1", "bank-1"].plant([MISSING], topic="shop-1-orders", group="bank-1-books")
    result = compare_fleet(houses.fleet())
    result.unreachable["gone"] = "<script>alert(1)</script>\x1b[2J"
    result.doubles.append(Double("shop-1", "fees", "fees", ("bank-1", "bank-2"), 3))
    rows = [
        TotalRow((f"k{number}",), "amount", {"bank-1": Decimal(number), "bank-2": Decimal(-7)}, Decimal(), Decimal())
        for number in range(60)
    ]
    result.totals.append(TotalResult("money", ("currency",), tuple(rows)))
    text = render_fleet(result)
    page = Page(text)
    assert [name for _, name in page.headings] == [
        "1 member or database came to no result, or not to its end; of the others: 1 difference left; "
        + result.totals[0].verdict,
        *("No result", "Databases", "Taken in several databases", "money", "Findings"),
    ]
    assert "<script" not in text
    assert "\x1b" not in text
    for told in ("shop-1 → bank-1", "shop-2 → bank-2", "shop-1-orders → bank-1-books", "1 missing", str(lost), "fees"):
        assert told in text
    # What doesn't add up comes first: k7 does, and isn't among the forty.
    assert "k8 amount" in text
    assert "k7 amount" not in text
    assert "20 more rows" in text
    assert not re.search(r"(src|href)=\"(?!#|data:)", text)


def test_a_fleet_in_sync_makes_a_quiet_page(houses: Houses) -> None:
    """The verdict, and the databases."""
    page = Page(render_fleet(compare_fleet(houses.fleet())))
    assert page.headings == [(1, "in sync"), (2, "Databases")]
