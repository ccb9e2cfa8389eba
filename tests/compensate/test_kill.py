"""Workers that are killed in each step of a compensation: others finish it, and the money is back once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from uuid import UUID

import pytest
from sqlalchemy import Engine, make_url

from outbox import Message
from outbox.consumer.consumer import Consumer
from outbox.errors import ActRefused
from tests.compensate.killed import serve
from tests.compensate.support import Town, give_back, refuse, settle
from tests.kit import stride, wait_until
from tests.kit.bench import Bench

pytestmark = pytest.mark.slow

NAME = "outbox-compensation"
#: A step has more round trips than that: the statements of a process that has never run them go one by one.
STRIDE = stride(4)


class Killer:
    """Has passes made by processes, and kills them."""

    def __init__(self, pipe: Pipe, town: Bench, *others: Engine) -> None:
        self._pipe = pipe
        self._urls = [self._named(engine) for engine in (town.producer, town.consumer, *others)]
        self._databases = [make_url(url).database for url in self._urls]
        self._town = town

    def kill_after(self, round_trips: int) -> bool:
        """Kill a pass after so many round trips; True if it came to its end before that."""
        self._pipe.send((self._urls[0], self._urls[1:], round_trips))
        assert self._pipe.poll(60), "the process neither stops nor ends"
        said, pid = self._pipe.recv()
        if said == "stopped":
            os.kill(int(pid), signal.SIGKILL)
        self._pipe.send("gone?")
        assert self._pipe.recv()[0] == "gone"
        wait_until(self._nobody, "the servers have noticed the end")
        return bool(said == "ended")

    def _nobody(self) -> bool:
        sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = :name"
        return bool(self._town.rows(sql, name=NAME) == [0])

    def _named(self, engine: Engine) -> str:
        url = make_url(engine.url).update_query_dict({"application_name": NAME})
        return url.render_as_string(hide_password=False)


@pytest.fixture(scope="module")
def forking() -> Iterator[Pipe]:
    """A process that forks those that are killed."""
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield pipe
    process.kill()
    process.join()


class Banks:
    """Bank A, whose transfers go to bank B and bank C."""

    def __init__(self, town: Town, third: Engine, pipe: Pipe) -> None:
        self.town, self.third = town, third
        self.killer = Killer(pipe, town, third)
        self._connection = third.connect()
        self.at_c = self._consumer(refuse)
        self.at_b = town.declare(retry_delays=())

    def close(self) -> None:
        """Close the connection to bank C."""
        self._connection.close()

    def _consumer(self, handler: Callable[..., None]) -> Consumer:
        return self.town.declare_on(self._connection, handler, group="c", retry_delays=())

    def transfer(self) -> UUID:
        """Make a transfer that is parked at bank C, and that bank B has yet to come to."""
        half_id = self.town.transfer()
        self.town.consume_on(self.at_c, self._connection, self.town.source)
        assert self.town.status(half_id, self.third) == {"c": "parked"}
        return half_id

    def finish(self) -> None:
        """Have other workers do what is left, as long as it takes."""
        self.town.compensate_by(give_back, self.third)
        for _ in range(5):
            self.town.age()
            if not self.town.work():
                return
        raise AssertionError("it never comes to an end")


@pytest.fixture
def third(new_engine: Callable[[], Engine]) -> Engine:
    """The database of bank C."""
    return new_engine()


@pytest.fixture
def banks(town: Town, third: Engine, forking: Pipe) -> Iterator[Banks]:
    """Three banks."""
    banks = Banks(town, third, forking)
    yield banks
    banks.close()


def test_killed_while_it_rolls_back(banks: Banks) -> None:
    """Killed anywhere, the message takes no effect anywhere once it is begun, and the money is back once."""
    town, before = banks.town, 1000
    stages = set()
    for after in itertools.count(1, STRIDE):
        half_id = banks.transfer()
        bulk_job_id = town.order(half_id)
        ended = banks.killer.kill_after(after)
        stages.add((bool(town.status(half_id)), town.status(half_id, banks.third)["c"], town.refunds(half_id)))
        banks.finish()
        assert town.item(bulk_job_id)[0] == "done"
        assert (town.status(half_id), town.status(half_id, banks.third)) == ({"g": "quarantined"}, {"c": "quarantined"})
        assert (town.balance, town.refunds(half_id)) == (before, 1)
        with pytest.raises(ActRefused):
            town.sink.operator.retry(half_id, group="g", by="me", why="test")
        if ended:
            break
    settle(town, banks.at_b)
    assert town.ledger() == []
    # Each stage was seen: nothing done, one bank quarantined, both, and all done.
    assert stages == {(False, "parked", 0), (True, "parked", 0), (True, "quarantined", 0), (True, "quarantined", 1)}
    # Each quarantine was made, and recorded, once.
    acts = town.rows("SELECT count(*), count(DISTINCT target) FROM outbox.audit WHERE action = 'quarantine'")
    assert acts == [(len(range(1, after + 1, STRIDE)),) * 2]


def test_killed_while_it_withdraws(banks: Banks) -> None:
    """Killed anywhere while it releases: all quarantines are released in the end, and no money is given back."""
    town = banks.town

    def fail(message: Message, session: object) -> None:
        raise RuntimeError("bank A is closed")

    stages = set()
    transfers = []
    for after in itertools.count(1, STRIDE):
        half_id = banks.transfer()
        transfers.append(half_id)
        town.compensate_by(fail, banks.third)
        bulk_job_id = town.order(half_id)
        town.work()
        assert town.said(bulk_job_id).startswith("failed: ")
        town.cancel(bulk_job_id)
        ended = banks.killer.kill_after(after)
        stages.add((bool(town.status(half_id)), town.status(half_id, banks.third)["c"]))
        banks.finish()
        assert town.item(bulk_job_id) == ("cancelled", "refused: cancelled by bob")
        assert (town.status(half_id), town.status(half_id, banks.third)) == ({}, {"c": "parked"})
        if ended:
            break
    assert town.balance == 1000 - 100 * len(transfers)
    settle(town, banks.at_b)
    assert [town.effects(half_id) for half_id in transfers] == [1] * len(transfers)
    assert stages == {(True, "quarantined"), (False, "quarantined"), (False, "parked")}
