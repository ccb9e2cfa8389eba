"""Producers and checkers that are killed after each of their round trips: others find the one right verdict."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Orphan, Outbox, Outgoing, Resolution
from outbox.embedded import ServerLike
from tests.check import killed
from tests.check.killed import NOTE, SETTINGS
from tests.check.town import PROVIDER_TABLE, TABLES, Child, Look, Town
from tests.kit.effort import EFFORT

COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN
FENCED = ("fenced", "fenced, refused")
FUNCTIONS = ("transactional", "transactional, refused", *FENCED, "unfenced", "unfenced, refused")

#: By day each function is tried sync and async, cold and warm; by night in each pair of these.
_BY_DAY = {"fenced": {(False, False), (True, True)}, "unfenced": {(False, True), (True, False)}}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def urls(server: ServerLike, template: str) -> Iterator[tuple[str, str]]:
    """The URLs of the service's database and of the provider's."""
    names = ("killed", "killed_provider")
    for name, sql in zip(names, (TABLES, PROVIDER_TABLE), strict=True):
        server.create_database(name, template=template)
        engine = create_engine(server.url(name), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(sql)
        engine.dispose()
    yield server.url(names[0]), server.url(names[1])
    for name in names:
        server.drop_database(name)


@pytest.fixture
def town(urls: tuple[str, str]) -> Iterator[Town]:
    """A town in which nothing has happened yet."""
    with ExitStack() as stack:
        yield Town(*urls, stack)


def heal(town: Town, numbers: list[int]) -> None:
    """Have workers decide what is undecided, and see that each verdict is right, and was found by the right one.

    The first worker has no checker: nothing but a fence may tell it anything. The second asks the provider.
    """
    before = {number: half for number in numbers if (half := town.half(number))}
    unfenced = [number for number, half in sorted(before.items()) if half.resolution is None and half.topic == "paid"]
    asked: list[int] = []

    def checker(orphan: Orphan) -> Resolution:
        asked.append(orphan.body["number"])
        return COMMIT if town.paid(orphan.body["number"]) else ROLLBACK

    town.worker().age_and_check()
    assert [number for number in sorted(before) if town.half(number).resolution is None] == unfenced
    town.worker(checker).age_and_check()
    assert sorted(asked) == unfenced
    town.deliver()
    effects = town.count("effect")
    for number in numbers:
        changed, half = town.changed(number), town.half(number)
        assert effects[number] == int(changed), number
        if half is None:
            assert not changed, number
        else:
            verdict = (COMMIT if changed else ROLLBACK, before[number].decided_by or "check")
            assert (half.resolution, half.decided_by) == verdict, number
    town.see_that_nothing_is_left()


# --- the producer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_async", "warm"),
    [
        pytest.param(name, is_async, warm, id=f"{name}-{('sync', 'async')[is_async]}-{('cold', 'warm')[warm]}")
        for name in FUNCTIONS
        for is_async in (False, True)
        for warm in (False, True)
        if (is_async == warm or "refused" not in name) and not (is_async and name.startswith("transactional"))
        if EFFORT > 1 or name not in _BY_DAY or (is_async, warm) in _BY_DAY[name]
    ],
)
def test_producer_is_killed(town: Town, name: str, is_async: bool, warm: bool) -> None:
    """A process is killed after any round trip of prepare, business, decision: change and message are both, or none."""
    numbers: list[int] = []
    looks: list[Look] = []
    for number in itertools.count(1):
        first = -number if warm else 0
        child = town.child(killed.call, town.url, town.provider_url, name, is_async, first)
        said, how = child.tell((number, number))
        numbers += [number, first] if first else [number]
        looks.append(town.look(number))
        child.kill()
        town.wait_for_the_end()
        if said == "ended":
            break
    assert how == ("Refused" if "refused" in name else "returned")
    assert looks[-1].changed == ("refused" not in name)
    see_every_stage(name, looks)
    heal(town, numbers)


def see_every_stage(name: str, looks: list[Look]) -> None:
    """See that the process was stopped at each stage of its function."""
    stages = {(look.prepared, look.decided) for look in looks}
    if name.startswith("transactional"):
        assert stages == ({(False, False)} if "refused" in name else {(False, False), (True, True)})
        return
    assert stages == {(False, False), (True, False), (True, True)}
    undecided = [look for look in looks if look.prepared and not look.decided]
    # Before the business, while it runs, and after it where that isn't the decision itself.
    assert {look.fence for look in undecided} == ({False, True} if name in FENCED else {False})
    assert {look.changed for look in undecided} == ({False, True} if name == "unfenced" else {False})


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_connections_of_the_producer_are_cut(town: Town, name: str, is_async: bool) -> None:
    """The server ends all connections after any round trip: who hears that all went well can rely on it."""
    child = town.child(killed.call, town.url, town.provider_url, name, is_async, 0)
    well = "Refused" if "refused" in name else "returned"
    after, outcomes, undisturbed = 1, dict[int, str](), False
    while not undisturbed:
        number = len(outcomes) + 1
        said, how = child.tell((number, after))
        undisturbed = (said, how) == ("ended", well)
        if said == "stopped":
            town.cut()
            how = child.go_on()
            after += 1
        outcomes[number] = how
    heal(town, list(outcomes))
    for number, how in outcomes.items():
        assert how in {well, "OperationalError"}
        assert how != "returned" or town.changed(number)
        assert "refused" not in name or not town.changed(number)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", FENCED)
def test_check_comes_after_each_round_trip(town: Town, name: str, is_async: bool) -> None:
    """A check after any round trip of a fenced function: what runs is left alone, what was decided first counts."""
    child = town.child(killed.call, town.url, town.provider_url, name, is_async, 0)
    well = "Refused" if "refused" in name else "returned"
    numbers: list[int] = []
    looks: list[Look] = []
    while True:
        number = len(numbers) + 1
        numbers.append(number)
        said, how = child.tell((number, number))
        if said == "ended":
            break
        looks.append(look := town.look(number))
        orphan = look.prepared and not look.decided and not look.fence and not town.writing_op()
        town.worker().age_and_check()
        assert town.look(number).decided == (look.decided or orphan)
        how = child.go_on()
        before_its_business = orphan and not any(each.fence for each in looks)
        assert how == ("AlreadyRolledBack" if before_its_business else well)
        assert town.changed(number) == (how == "returned")
    assert how == well
    assert any(look.fence for look in looks)
    heal(town, numbers)


# --- the checker -----------------------------------------------------------------------------------------


class Colleague:
    """The checker of another worker."""

    def __init__(self, kind: str, answer: Resolution) -> None:
        self.asked: Counter[int] = Counter()
        self.answer = answer
        self.checker = {"fence": None, "plain": self.plain}.get(kind, self.with_session)

    def plain(self, orphan: Orphan) -> Resolution:
        """Answer."""
        self.asked[orphan.body["number"]] += 1
        return self.answer

    def with_session(self, orphan: Orphan, session: Session) -> Resolution:
        """Answer, and write something."""
        session.execute(NOTE, {"number": orphan.body["number"]})
        return self.plain(orphan)


def prepare(town: Town, number: int, *, fenced: bool) -> None:
    """Write an orphan that is due at once."""
    producer, topic = Outbox(town.engine, settings=SETTINGS)._producer, "fenced" if fenced else "paid"
    with town.engine.begin() as connection:
        producer.prepare(connection, topic, Outgoing({"number": number}), fenced=fenced, immunity=0)


@pytest.mark.parametrize(
    ("end", "kind", "answer"),
    [
        ("kill", "plain", COMMIT),
        ("kill", "session", COMMIT),
        ("kill", "async session", UNKNOWN),
        ("kill", "fence", ROLLBACK),
        ("cut", "plain", UNKNOWN),
        ("cut", "session", COMMIT),
        ("cut", "async session", COMMIT),
        ("cut", "fence", ROLLBACK),
    ],
)
def test_checker_is_ended(town: Town, end: str, kind: str, answer: Resolution) -> None:
    """A checking process is killed, or cut off, after any round trip, or in the question: another finds the verdict.

    Not before the lease has ended, and what was asked counts.
    """
    before: dict[int, list[str | None]] = {}
    stages: set[tuple[str, bool, bool]] = set()
    for after in itertools.count(int(kind == "fence")):
        child = new_checker(town, kind, answer)
        prepare(town, after, fenced=kind == "fence")
        said, where = child.tell(after)
        if said == "stopped":
            stages.add((where, None in town.answers(after), town.writing_op()))
        if said == "stopped" and end == "cut":
            town.cut()
            child.go_on()
        child.kill()
        town.wait_for_the_end()
        before[after] = town.answers(after)
        if not before[after]:
            town.postpone(after)  # nobody has leased it: the next process would
        if said == "ended":
            assert where == "returned"
            break
    see_the_stages(kind, answer, stages)
    heal_checks(town, kind, answer, before)


def new_checker(town: Town, kind: str, answer: Resolution) -> Child:
    """Start a process that has made its first pass, for which nothing was due."""
    child = town.child(killed.check, town.url, kind, answer)
    assert child.tell(-1) == ("ended", "returned")
    return child


def see_the_stages(kind: str, answer: Resolution, stages: set[tuple[str, bool, bool]]) -> None:
    """See that the process was stopped everywhere: where it was, whether a lease was open, an op written."""
    assert ("not asked", False, False) in stages
    if kind == "fence":
        assert ("not asked", False, True) in stages
        return
    # After the lease and before the question; in the question; after the op and before its COMMIT.
    assert stages >= {("not asked", True, False), ("asked", True, False)}
    assert (("asked", True, True) in stages) == (answer is COMMIT)


def heal_checks(town: Town, kind: str, answer: Resolution, before: dict[int, list[str | None]]) -> None:
    """Have another worker go on, and see what it finds."""
    colleague = Colleague(kind, answer)
    worker = town.worker(colleague.checker)
    assert not worker.check(), "somebody may still be asking"
    worker.age_and_check(SETTINGS.max_checks + 1)
    notes = town.count("note")
    for number, earlier in before.items():
        half, answers = town.half(number), town.answers(number)
        assert answers[: len(earlier)] == earlier
        if answer is UNKNOWN:
            assert (half.check_times, half.parked, len(answers)) == (SETTINGS.max_checks, True, SETTINGS.max_checks)
        else:
            assert (half.resolution, half.decided_by) == (answer, "check")
            assert answers.count(answer) == 1
            assert answers[-1] == answer
        assert notes[number] == (answer is COMMIT and "session" in kind)
        assert colleague.asked[number] == (0 if kind == "fence" else len(answers) - len(earlier))
    town.deliver()
    assert town.count("effect") == (Counter(before.keys()) if answer is COMMIT else Counter())
    town.see_that_nothing_is_left()
