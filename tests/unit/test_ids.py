"""UUIDv7: bits, order, and no id twice, in threads and after a fork."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.message import model as ids
from outbox.message.ids import uuid7_at
from outbox.message.model import uuid7


def milliseconds(id_: UUID) -> int:
    """Return the time in an id."""
    return id_.int >> 80


def test_bits() -> None:
    """Version 7, RFC variant, and the present time in front."""
    before = time.time_ns() // 1_000_000
    id_ = uuid7()
    assert (id_.version, id_.variant) == (7, RFC_4122)
    assert before - 1000 <= milliseconds(id_)


def test_order_within_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand ids of one millisecond strictly increase and stay in it."""
    monkeypatch.setattr(ids, "_last_ms", 0)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    made = [uuid7() for _ in range(100_000)]
    assert all(a < b for a, b in pairwise(made))
    assert {milliseconds(id_) for id_ in made} == {now // 1_000_000}
    assert {(id_.version, id_.variant) for id_ in made} == {(7, RFC_4122)}


@given(st.lists(st.integers(-(10**13), 10**13), min_size=2, max_size=50))
def test_order_when_the_clock_jumps(steps: list[int]) -> None:
    """However the clock jumps, ids of one process strictly increase."""
    moment = time.time_ns() + 10**16
    made = []
    with pytest.MonkeyPatch.context() as patch:
        # Restored afterwards, or all later ids of this process would be from the future.
        patch.setattr(ids, "_last_ms", ids._last_ms)
        patch.setattr(ids, "_counter", ids._counter)
        for step in steps:
            moment += step
            patch.setattr(time, "time_ns", lambda: moment)  # noqa: B023
            made.append(uuid7())
    assert all(a < b for a, b in pairwise(made))


def test_threads_share_the_order() -> None:
    """Ids made by eight threads are all different, and each thread's increase."""
    made: list[list[UUID]] = [[] for _ in range(8)]
    start = threading.Barrier(8)

    def work(mine: list[UUID]) -> None:
        start.wait()
        mine.extend(uuid7() for _ in range(3000))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a < b for mine in made for a, b in pairwise(mine))
    assert len({id_ for mine in made for id_ in mine}) == 8 * 3000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_make_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children forked in one millisecond, even with the lock taken, repeat nobody's ids."""
    now = time.time_ns() + 10**12
    monkeypatch.setattr(ids, "_last_ms", ids._last_ms)
    monkeypatch.setattr(ids, "_counter", ids._counter)
    monkeypatch.setattr(time, "time_ns", lambda: now)
    uuid7()
    readers = []
    with ids._lock:
        for _ in range(4):
            reader, writer = os.pipe()
            if os.fork() == 0:
                os.write(writer, b"".join(uuid7().bytes for _ in range(100)))
                os._exit(0)
            os.close(writer)
            readers.append(reader)
    made = [uuid7() for _ in range(100)]
    for reader in readers:
        with os.fdopen(reader, "rb") as pipe:
            raw = pipe.read()
        assert len(raw) == 1600
        made += [UUID(bytes=raw[n : n + 16]) for n in range(0, 1600, 16)]
        os.wait()
    # Not only the random tail differs: their counters do.
    assert len({id_.int >> 32 for id_ in made}) == 500


def test_bound_of_a_moment() -> None:
    """`uuid7_at` is not above any id made from then on, and above all of the millisecond before."""
    moment = time.time()
    bound = uuid7_at(moment)
    assert (bound.version, bound.variant) == (7, RFC_4122)
    assert milliseconds(bound) == int(moment * 1000)
    assert bound <= uuid7()
    assert uuid7_at(moment - 0.002) < bound
