"""``outbox inbox``: what groups have handled, failed at or parked, in one database and in several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, make_url

from outbox.cli.database import DatabasesOptions
from outbox.cli.output import Code
from tests.cli.books import Books
from tests.cli.conftest import Cli

BECAUSE = ("--reason", "the mail server is back", "--actor", "ann")


def test_list(cli: Cli, books: Books) -> None:
    """All there is, or what the options pick."""
    consumed = books.send({"do": "nothing"})
    failed, parked = books.failed("the till is locked"), books.parked("looks wrong")
    shown = cli("inbox", "list", "-o", "json")
    assert (shown.code, shown.err) == (0, "")
    assert [row["message_id"] for row in shown.json["items"]] == [str(each) for each in (*parked, *failed, *consumed)]
    assert [row["status"] for row in shown.json["items"]] == ["parked", "failed", "consumed"]

    def ids(*arguments: str) -> list[str]:
        return cli("inbox", "list", "-o", "id", *arguments).out.split()

    assert ids("--status", "failed", "--status", "parked") == [f"till/{each}" for each in (*parked, *failed)]
    assert ids("--message", str(failed[0])) == [f"till/{failed[0]}"]
    assert ids("--error", "locked") == [f"till/{failed[0]}"]
    assert ids("--attempts", "2") == []
    assert ids("--topic", "refunds") == []
    assert "the till is locked" in cli("inbox", "list").out


def test_pages_of_a_span(cli: Cli, books: Books) -> None:
    """The next page of `--since 1h` is one of the same hour."""
    ids = books.failed(*["the till is locked"] * 5)
    seen: list[str] = []
    after: list[str] = []
    for _ in range(5):
        page = cli("inbox", "list", "--since", "1h", "--limit", "2", "-o", "json", *after)
        assert page.code == 0, page.err
        seen += [row["message_id"] for row in page.json["items"]]
        if page.json["next_page_token"] is None:
            break
        after = ["--after", page.json["next_page_token"]]
    assert seen == [str(each) for each in reversed(ids)]
    assert "--after" in cli("inbox", "list", "--limit", "2").err
    other = cli("inbox", "list", "--status", "parked", *after)
    assert (other.code, other.out) == (Code.USAGE, "")
    garbage = cli("inbox", "list", "--since", "1h", "--after", "x")
    assert (garbage.code, garbage.out) == (Code.USAGE, "")


def test_retry_and_park(cli: Cli, books: Books) -> None:
    """Failed messages are due at once or parked; by name or as many as fit."""
    ids = books.failed("the till is locked", "the till is locked", "no paper")
    result = cli("inbox", "park", f"till/{ids[2]}", "--reason", "no paper until Monday", "--actor", "ann", "--yes")
    assert result.code == 0, result.err
    assert books.statuses(*ids) == ["failed", "failed", "parked"]
    due = (
        "SELECT count(*) FROM outbox.consumer_message WHERE status = 'failed' AND next_attempt_at <= clock_timestamp()"
    )
    assert books.rows(due)[0][0] == 0
    assert cli("inbox", "retry", *BECAUSE, "--yes").code == Code.USAGE
    assert cli("inbox", "retry", "--status", "failed", *BECAUSE, "--yes").code == 0
    assert books.rows(due)[0][0] == 2
    assert cli("inbox", "retry", str(ids[2]), "--group", "till", "--yes").code == 0
    assert books.rows(due)[0][0] == 3
    assert ("ann", "park", f"till/{ids[2]}", "no paper until Monday") in books.audited()


@pytest.fixture
def apart(engine: Engine, new_engine: Callable[..., Engine]) -> Books:
    """A shop whose till has a database of its own."""
    return Books.open(engine, new_engine())


def test_several_databases(cli: Cli, apart: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """More databases come from options or the environment; one may be picked by its name."""
    (one,) = apart.parked("looks wrong")
    other = apart.till.url.render_as_string(hide_password=False)
    named = ("--database", f"till={other}")
    assert cli("inbox", "list", "-o", "id").out == ""
    (row,) = cli("inbox", "list", *named, "-o", "json").json["items"]
    assert (row["message_id"], row["database"]) == (str(one), "till")
    assert " till" in cli("inbox", "list", *named).out.splitlines()[1]
    own = str(make_url(apart.outbox.url).database)
    assert cli("inbox", "list", *named, "--in", own, "-o", "id").out == ""
    monkeypatch.setenv(
        "OUTBOX_CONSOLE_DATABASES",
        f"\n  till={other}\n shop={apart.outbox.url.render_as_string(hide_password=False)}\n",
    )
    assert cli("inbox", "list", "--in", "till", "-o", "id").out.split() == [f"till/{one}"]
    assert len(cli("messages", "list", "-o", "id").out.split()) == 1
    monkeypatch.delenv("OUTBOX_DATABASE_URL")
    assert cli("inbox", "retry", f"till/{one}", "--yes").code == 0
    assert apart.statuses(one) == ["failed"]
    way = cli("messages", "show", str(one), "-o", "json").json
    assert [row["status"] for row in way["inbox"]] == ["failed"]
    assert way["half"]["status"] == "dispatched"
    assert [act["action"] for act in way["audit"]] == ["retry"]


@pytest.mark.parametrize(
    ("given", "hint", "code"),
    [
        ("nonsense", "'nonsense' must be NAME=URL", Code.USAGE),
        ("postgresql://me:hunter2@127.0.0.1:1/x", "x can't be reached", Code.UNAVAILABLE),
        ("a b=postgresql://me:hunter2@host/x", "'a b' can't be the name", Code.USAGE),
        ("till=hunter2", "must be NAME=URL", Code.USAGE),
        ("till=mysql://me:hunter2@host/x", "needs PostgreSQL, not 'mysql'", Code.CONFIG),
        ("till=postgresql://me:hunter2@host:port/x", "can't be read", Code.CONFIG),
        ("till=postgresql://me:hunter2@127.0.0.1:1/x", "till can't be reached", Code.UNAVAILABLE),
    ],
)
def test_bad_database(cli: Cli, given: str, hint: str, code: Code) -> None:
    """A database that can't be used is named in one line, without its password; what others have is shown."""
    result = cli("inbox", "list", "--database", given)
    assert (result.code, result.err.count("\n")) == (code, 1)
    assert bool(result.out) is (code is Code.UNAVAILABLE)
    assert hint in result.err
    assert "hunter2" not in result.err


def test_a_command_for_databases_can_be_typed_again() -> None:
    """With those that have a name and those that have none, and without their passwords."""
    named, unnamed = "till=postgresql://me:hunter2@host/x?sslmode=require", "postgresql://me:hunter2@one,two/y?a=b"
    assert DatabasesOptions(database=(named, unnamed), schema="s").again("bulk watch 1") == (
        "outbox bulk watch 1 --database 'till=postgresql://me@host/x?sslmode=require' "
        "--database 'postgresql://me@one,two/y?a=b' --schema s"
    )


def test_databases_of_several_hosts_in_the_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comma separates databases as a blank does, but not the hosts of one."""
    several = "postgresql://me:hunter2@127.0.0.1,127.0.0.1/x?port=1,1"
    monkeypatch.setenv("OUTBOX_CONSOLE_DATABASES", f"a={several},b={several}")
    result = cli("inbox", "list")
    assert "'a' and 'b' are one database" in result.err
    assert (result.code, result.out) == (Code.USAGE, "")


def test_one_database_twice(cli: Cli, url: str) -> None:
    """Two names for one database would show everything twice."""
    result = cli("inbox", "list", "--database", f"a={url}", "--database", f"b={url}")
    assert "'a' and 'b' are one database" in result.err
    assert (result.code, result.out) == (Code.USAGE, "")
    assert cli("inbox", "list", "--database", f"a={url}", "--database", f"a={url}").code == Code.USAGE
