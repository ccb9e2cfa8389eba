"""What never came to an intake: by the positions that a relay has published, and by what the broker has."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine

from outbox import Outbox, Settings
from outbox.relay import Received
from outbox.relay.intake.comparison import compare
from outbox.relay.intake.gaps import GRACE, join_once
from outbox.relay.intake.source import Confirmed
from outbox.telemetry.events import IntakeGap, IntakeMissing
from outbox.telemetry.hooks import TelemetryEvent
from outbox.worker.connections import WorkerDatabase
from tests.cli.conftest import run_cli
from tests.doctor.support import codes, examine
from tests.kit import wait_until


def of(position: int, queue: int = 0, topic: str = "orders", source: str = "/shop") -> Received:
    """Return a message that a relay has published."""
    headers = {"id": str(uuid4()), "source": source, "outboxtopic": topic, "outboxqueue": str(queue)}
    headers["sequence"] = f"{position:020d}"
    return Received("", b"x", {f"ce-{name}": value for name, value in headers.items()})


class Given:
    """A source that gives what a test puts in."""

    name = "given"

    def __init__(self) -> None:
        self.messages: list[Received] = []

    def take(self, most: int, _: float, /) -> list[Received]:
        """Return the first ones."""
        return self.messages[:most]

    def confirm(self) -> None:
        """Forget them."""
        self.messages.clear()

    def close(self) -> None:
        """Do nothing."""


class Taking:
    """A service that takes messages in."""

    def __init__(self, engine: Engine, settings: Settings, **options: Any) -> None:
        self.engine, self.settings, self.source = engine, settings, Given()
        self.app = Outbox(engine, settings=settings)
        self.app.intake("taken", source=self.source, **options)
        self.connection: Connection = WorkerDatabase(engine).connect()

    def take(self, *positions: int, **options: Any) -> None:
        """Take messages of these positions, in one list."""
        self.source.messages = [of(each, **options) for each in positions]
        self.app.intakes[0].once(self.connection, self.settings.schema)

    def join(self, seconds: float = 0.0) -> int:
        """Let so many seconds go by, and join what can be; return how many gaps were told."""
        with self.engine.begin() as connection:
            connection.exec_driver_sql(
                "UPDATE outbox.intake_range SET stored_at = stored_at - make_interval(secs => %s)", (seconds,)
            )
        return join_once(self.connection, self.settings).done

    def ranges(self) -> list[tuple[int, int]]:
        """The ranges that there are."""
        with self.engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT first, last FROM outbox.intake_range ORDER BY first, last").all()
        return [(row.first, row.last) for row in rows]


@pytest.fixture
def taking(engine: Engine, settings: Settings) -> Iterator[Taking]:
    """A service that takes messages in."""
    taking = Taking(engine, settings)
    yield taking
    taking.connection.close()


def told(heard: list[TelemetryEvent]) -> list[tuple[int, int, int]]:
    """Return queue, first and last of the gaps that were told."""
    return [(each.queue, each.first, each.last) for each in heard if isinstance(each, IntakeGap)]


def test_what_comes_late_or_twice_is_no_gap(taking: Taking, heard: list[TelemetryEvent]) -> None:
    """Ranges are joined as they come, in any order."""
    taking.take(1, 2, 5, 6)
    taking.take(9, 8)
    assert (taking.join(), taking.ranges()) == (0, [(1, 2), (5, 6), (8, 9)])
    taking.take(2, 3, 4)
    taking.take(7, 7, 8)
    assert (taking.join(), taking.ranges()) == (0, [(1, 9)])
    assert (taking.join(2 * GRACE), told(heard)) == (0, [])


def test_a_gap_is_told_once_and_found_until_it_is_filled(taking: Taking, heard: list[TelemetryEvent]) -> None:
    """By the event, and by the doctor."""
    taking.take(1, 2, 6)
    taking.take(1, 3, queue=7)
    assert taking.join(GRACE / 2) == 0
    assert "intake.gap" not in codes(examine(taking.engine, taking.settings))
    assert (taking.join(GRACE), taking.join(GRACE)) == (2, 0)
    assert told(heard) == [(0, 3, 5), (7, 2, 2)]
    assert "intake.gap" in codes(examine(taking.engine, taking.settings))
    taking.take(3, 4, 5)
    taking.take(2, queue=7)
    assert taking.join() == 0
    assert "intake.gap" not in codes(examine(taking.engine, taking.settings))


def test_what_comes_again_behind_a_gap_neither_hides_it_nor_tells_it_again(
    taking: Taking, heard: list[TelemetryEvent]
) -> None:
    """Since when it is one, and that it was told, is known of the range that came first."""
    taking.take(1, 2, 6, 7, 8, 9)
    for _ in range(3):
        assert taking.join(GRACE / 4) == 0
        taking.take(6)
    assert taking.join(GRACE / 4 + 1) == 1
    taking.take(6)
    assert taking.join() == 0
    assert "intake.gap" in codes(examine(taking.engine, taking.settings))
    assert (taking.join(2 * GRACE), told(heard)) == (0, [(0, 3, 5)])


def test_many_gaps_of_a_queue_are_told_together(taking: Taking, heard: list[TelemetryEvent]) -> None:
    """A relay with a filter leaves one between all that it publishes."""
    taking.take(*range(1, 400, 2))
    assert taking.join(GRACE + 1) == 1
    (gap,) = [each for each in heard if isinstance(each, IntakeGap)]
    assert (gap.first, gap.last, gap.missing) == (2, 398, 199)


def test_sources_topics_queues_and_epochs_are_by_themselves(taking: Taking) -> None:
    """Numbers of one say nothing of another; a new epoch begins anew."""
    taking.take(1, 2)
    taking.take(8, queue=1)
    taking.take(20, topic="other")
    taking.take(30, source="/else")
    taking.take((1 << 32) + 3, (1 << 32) + 4)
    assert taking.join(2 * GRACE) == 0
    assert len(taking.ranges()) == 5


def test_what_is_forgotten_is_no_gap(taking: Taking, settings: Settings) -> None:
    """The inbox knows nothing of that time any more."""
    taking.take(1, 5)
    assert taking.join(GRACE + 1) == 1
    assert (taking.join(settings.inbox_retention), taking.ranges()) == (0, [(1, 5)])


def test_a_part_of_a_topic(engine: Engine, settings: Settings) -> None:
    """Nothing is noted where positions are left out on purpose."""
    taking = Taking(engine, settings, complete=False)
    taking.take(1, 5)
    taking.connection.close()
    assert taking.ranges() == []


@pytest.mark.parametrize(
    "headers",
    [
        {"ce-outboxtopic": "t", "ce-outboxqueue": "0"},
        {"ce-outboxtopic": "t", "ce-outboxqueue": "x", "ce-sequence": "1"},
        {"ce-outboxtopic": "t", "ce-outboxqueue": "0", "ce-sequence": "9" * 30},
        {"ce-outboxtopic": "t", "ce-outboxqueue": "0", "ce-sequence": "-1"},
        {"ce-outboxtopic": "t", "ce-outboxqueue": "99999999999", "ce-sequence": "1"},
    ],
)
def test_what_is_no_position(taking: Taking, headers: dict[str, str]) -> None:
    """What others publish, or forge, is taken in and noted nowhere."""
    taking.source.messages = [Received("x@1", b"x", headers)]
    assert taking.app.intakes[0].once(taking.connection, taking.settings.schema).done == 1
    assert taking.ranges() == []


def test_a_source_that_cannot_be_stored(taking: Taking, new_engine: Callable[[], Engine]) -> None:
    """Its letters are replaced."""
    taking.take(1, source="a\0b", topic="c\0d")
    assert taking.ranges() == [(1, 1)]


# --- against the broker ----------------------------------------------------------------------------------------------


class Keeping(Given):
    """A source whose broker keeps what was confirmed; ``age`` is how old (seconds) it is."""

    age = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Received] = []

    def confirm(self) -> None:
        """Keep them."""
        self.kept += self.messages
        super().confirm()

    def confirmed(self) -> Iterator[list[Confirmed]]:
        """Yield them, two by two."""
        at = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=self.age)
        for first in range(0, len(self.kept), 2):
            yield [Confirmed(each, at) for each in self.kept[first : first + 2]]


@pytest.fixture
def keeping(taking: Taking) -> Taking:
    """A service whose broker keeps what it gave, of which one message is lost here."""
    taking.app.intakes.clear()
    taking.source = Keeping()
    taking.app.intake("taken", source=taking.source)
    taking.take(1, 2, 3, 4, 5)
    with taking.engine.begin() as connection:
        lost = connection.exec_driver_sql(
            "DELETE FROM outbox.half_message WHERE id = (SELECT id FROM outbox.half_message ORDER BY id LIMIT 1)"
            " RETURNING id"
        )
        connection.exec_driver_sql("DELETE FROM outbox.op_message WHERE half_id = %s", (lost.scalar_one(),))
    return taking


def test_the_command(keeping: Taking, monkeypatch: pytest.MonkeyPatch, heard: list[TelemetryEvent]) -> None:
    """It shows what is missing, and where the broker has it; then it stores that."""
    module = ModuleType("loyalty_app")
    module.outbox = keeping.app  # type: ignore[attr-defined]  # as an application has it
    monkeypatch.setitem(sys.modules, "loyalty_app", module)
    command = "reconcile", "intake", "taken", "--app", "loyalty_app:outbox"
    found = run_cli(*command, "-o", "json")
    assert (found.code, found.json["confirmed"], found.json["known"], found.json["lost"]) == (6, 5, 4, 1)
    (missing,) = found.json["missing"]
    assert found.json["missing"][0]["id"] in run_cli(*command).out
    assert (run_cli(*command, "--apply").code, run_cli(*command).code) == (0, 0)
    assert [str(each.message_id) for each in heard if isinstance(each, IntakeMissing)] == [missing["id"]] * 3
    assert run_cli(*command[:2], "other", *command[3:]).code != 0
    assert run_cli(*command, "--source", "other").code != 0
    assert run_cli(*command[:3]).code == 2


def test_what_is_older_than_the_retention_is_not_judged(keeping: Taking, settings: Settings) -> None:
    """It may have been consumed and deleted."""
    monkey: Any = keeping.source
    monkey.age = settings.retention + 1
    found = compare(keeping.connection, settings, keeping.app.intakes[0])
    assert (found.confirmed, found.unjudged, found.known, found.lost) == (5, 5, 0, 0)


def test_what_was_left_out_is_not_missing(keeping: Taking, settings: Settings) -> None:
    """A source that begins now has left out what was there before."""
    source: Any = keeping.source
    source.start, source.age = "now", 60.0
    found = compare(keeping.connection, settings, keeping.app.intakes[0])
    assert (found.unjudged, found.lost) == (5, 0)


def test_what_the_broker_has_twice_is_missing_once(keeping: Taking, settings: Settings) -> None:
    """Also in lists that are far apart."""
    source: Any = keeping.source
    source.kept *= 3
    found = compare(keeping.connection, settings, keeping.app.intakes[0])
    assert (found.confirmed, found.lost, len(found.missing)) == (15, 1, 1)


def test_what_is_in_another_topic_too(keeping: Taking, settings: Settings) -> None:
    """Its id here follows from its own: it isn't missing."""
    with keeping.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox.half_message SET topic = 'other'")
    assert compare(keeping.connection, settings, keeping.app.intakes[0], apply=True).stored == 5
    assert compare(keeping.connection, settings, keeping.app.intakes[0]).lost == 0


# --- one message in two topics ---------------------------------------------------------------------------------------


def test_two_topics_at_once(taking: Taking, engine: Engine) -> None:
    """Both have all, whichever comes first, and each always under the same ids."""
    other = Given()
    taking.app.intake("other", source=other)
    first, second = taking.app.intakes
    messages = [of(each) for each in range(1, 21)]
    other.messages = list(messages)
    with WorkerDatabase(engine).connect() as connection, ThreadPoolExecutor(1) as pool:
        with taking.connection.begin():
            first.store(taking.connection, "outbox", messages)
            stored = pool.submit(second.once, connection, "outbox")
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as looking:
                wait_until(lambda: _waits(looking) or stored.done(), "the second waits for the first")
        assert stored.result().done == 20
        ids = {topic: _ids(engine, topic) for topic in ("taken", "other")}
        assert [len(each) for each in ids.values()] == [20, 20]
        with engine.begin() as pruning:
            pruning.exec_driver_sql("DELETE FROM outbox.half_message WHERE topic = 'taken'")
            pruning.exec_driver_sql("DELETE FROM outbox.op_message")
        other.messages = list(messages)
        second.once(connection, "outbox")
        assert _ids(engine, "other") == ids["other"]


def _waits(connection: Connection) -> bool:
    sql = "SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    return any("intake_kind" in query for query in connection.exec_driver_sql(sql).scalars())


def _ids(engine: Engine, topic: str) -> set[str]:
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT id::text FROM outbox.half_message WHERE topic = %s", (topic,))
        return set(rows.scalars())
