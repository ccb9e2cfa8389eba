"""Leased messages by a random walk, against a model: what each take hands out, and which word on it counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from outbox.consumer.leased import settlement
from outbox.errors import LeaseEnded
from outbox.leases import LeasedGroup, LeasedMessage
from tests.consumer.test_leased import leased
from tests.kit.bench import Bench
from tests.kit.effort import tries

#: A message is tried so often before it is parked.
_ATTEMPTS = 3
_LONG = 3600.0


@dataclass(eq=False)
class ModelMessage:
    """What must be true of a message: ``lease`` counts now, ``acked`` is the one by which it is consumed.

    ``handed_out`` names the take that it comes from, also when its lease has ended: until it is given back.
    """

    id: UUID
    key: str
    state: str = "open"
    attempts: int = 0
    tried: bool = False
    lapsed: bool = False
    delayed: bool = False
    lease: LeasedMessage[Any] | None = None
    take_id: str | None = None
    handed_out: str | None = None
    acked: LeasedMessage[Any] | None = None

    @property
    def due(self) -> bool:
        """May a take hand it out, as far as it is the turn of its key?"""
        return self.state == "open" and self.lease is None and not self.delayed

    @property
    def exhausted(self) -> bool:
        """Is it parked by the take that finds out that its lease has ended?"""
        return self.lapsed and self.attempts + 1 >= _ATTEMPTS

    def ends(self, *, failed: bool) -> None:
        """Note that a lease is none any more; a message that was tried is so for good."""
        self.lease, self.take_id, self.tried = None, None, self.tried or failed


@dataclass
class LeaseWalk:
    """A walk: what was sent, what was ever taken, and the group as several processes have it."""

    bench: Bench
    seed: int
    rule: str | None
    messages: list[ModelMessage] = field(default_factory=list)
    old: list[tuple[ModelMessage, LeasedMessage[Any]]] = field(default_factory=list)
    takes: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)  # noqa: S311
        options = {} if self.rule is None else {"ordered": "key", "on_exhausted": self.rule}
        delays = (0.0,) * (_ATTEMPTS - 1)
        self.groups: list[LeasedGroup[Any]] = [leased(self.bench, retry_delays=delays, **options) for _ in range(3)]

    # --- what a take may hand out ------------------------------------------------------------------------------------

    def of_keys(self) -> Iterator[list[ModelMessage]]:
        """Yield what isn't settled, by what goes in order: the messages of a key, or each message by itself."""
        for key in sorted({each.key for each in self.messages}):
            of_key = [each for each in self.messages if each.key == key]
            if self.rule is None:
                yield from ([each] for each in of_key if each.state == "open")
            elif not (self.rule == "park" and any(each.state == "parked" for each in of_key)):
                yield [each for each in of_key if each.state == "open"]
            else:  # what is parked holds back all behind it
                yield []

    def expected(self) -> tuple[set[ModelMessage], set[ModelMessage]]:
        """Return what a take without a limit hands out, and what it may hand out beside."""
        known, must, may = set(self.bench.inbox()), set[ModelMessage](), set[ModelMessage]()
        for of_key in self.of_keys():
            if not of_key or not of_key[0].due:
                continue
            first, *rest = of_key
            if first.exhausted:
                may |= set(rest)  # if nothing waits for it, the next ones are read in the same take
                continue
            must.add(first)
            for each in rest:
                together = (each.id in known) == (first.id in known) and each.due
                if any(one.tried or one.lapsed for one in (first, each)) or not together:
                    break
                must.add(each)
        return must, may

    # --- steps -------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send some messages, of some keys."""
        for _ in range(self.dice.randrange(1, 5)):
            key = self.dice.choice("abcd")
            (id_,) = self.bench.send(str(len(self.messages)), key=key)
            self.messages.append(ModelMessage(id_, key))

    def take(self, most: int | None = None, take_id: str | None = None) -> None:
        """Take some or all, as one of the processes."""
        most = most or self.dice.choice((1, 2, 3, 1000))
        self.takes += 1
        take_id = take_id or f"take-{self.takes}"
        must, may = self.expected()
        if repeated := {each for each in self.messages if each.lease is not None and each.take_id == take_id}:
            must, may, most = repeated, set(), 1000
        taken = self.dice.choice(self.groups).take(most, invisible=_LONG, taker="walk", take_id=take_id)
        got = [self.found(each.message.id) for each in taken]
        assert len(got) == len(set(got)) <= most
        wrong = f"too many: {set(got) - must - may}, missing: {must - set(got)}, of {most}; inbox: {self.bench.inbox()}"
        assert set(got) <= must | may, wrong
        # A small one may have come to those alone that are at their end.
        ended = any(each.exhausted for each in self.messages)
        assert set(got) >= must if most == 1000 else bool(got) or ended or not must, wrong
        for key in "abcd" if self.rule else "":
            of_key = [each for each in got if each.key == key]
            before = [each for each in self.messages if each.key == key and each.state == "open"]
            # A client may ask again for what it has behind one that it has failed at.
            before = [each for each in before if not each.exhausted and (not repeated or each in repeated)]
            assert of_key == before[: len(of_key)], f"out of order: {of_key}, {before}"
        for message, each in zip(got, taken, strict=True):
            message.attempts += message.lapsed
            message.tried = message.tried or message.lapsed
            message.lapsed = False
            assert each.attempt == message.attempts + 1
            if message.lease is not None:
                self.old.append((message, message.lease))
            message.lease, message.take_id, message.handed_out = each, take_id, take_id
        inbox = self.bench.inbox()
        for message in self.messages:
            if message.exhausted and not message.delayed and inbox[message.id].status == "parked":
                message.state, message.lapsed, message.attempts = "parked", False, message.attempts + 1

    def repeat(self) -> None:
        """Take once more by the name of an earlier take."""
        if named := [each.take_id for each in self.messages if each.take_id is not None]:
            self.take(take_id=self.dice.choice(named))

    def held(self) -> ModelMessage | None:
        """Return a message under a lease that counts."""
        held = [each for each in self.messages if each.lease is not None]
        return self.dice.choice(held) if held else None

    def say(self, call: str, *values: Any) -> Any:
        """Call a function of the schema."""
        with self.bench.consumer.begin() as connection:
            return connection.exec_driver_sql(f"SELECT outbox.{call}", values).scalar_one()

    def acknowledge(self) -> None:
        """Acknowledge one, in Python or in SQL."""
        if (message := self.held()) is None or message.lease is None:
            return
        lease = message.lease
        assert lease.acknowledge() if self.dice.random() < 0.5 else self.say("acknowledge(%s)", lease.handle)
        message.state, message.attempts, message.acked = "consumed", message.attempts + 1, lease
        self.old.append((message, lease))
        message.ends(failed=False)

    def extend(self) -> None:
        """Extend a lease: in Python under a new number."""
        if (message := self.held()) is not None and message.lease is not None:
            message.lease.extend(_LONG) if self.dice.random() < 0.5 else self.say(
                "extend(%s, %s)", message.lease.handle, _LONG
            )

    def fail(self) -> None:
        """Fail at one, in Python or in SQL, which leaves it to the next take what follows."""
        if (message := self.held()) is None or message.lease is None:
            return
        lease, delay, take_id = message.lease, self.dice.choice((0.0, _LONG)), message.take_id
        if self.dice.random() < 0.5:
            lease.fail("ill", delay=delay)
            message.attempts += 1
            message.state = "parked" if message.attempts >= _ATTEMPTS else "open"
        else:
            self.say("fail(%s, 'ill', %s)", lease.handle, delay)
            message.lapsed = True
        message.delayed = delay > 0 and message.state == "open"
        self.old.append((message, lease))
        message.ends(failed=True)
        if self.rule is None or (message.state == "parked" and self.rule == "skip"):
            return
        # It holds its key: the later ones of its take that were never tried are given back.
        for each in self.messages[self.messages.index(message) + 1 :]:
            is_beside = each.key == message.key and each.state == "open" and each.handed_out == take_id
            if is_beside and (each.lease or each.lapsed) and not each.tried:
                if each.lease is not None:
                    self.old.append((each, each.lease))
                each.lapsed = False
                each.ends(failed=False)

    def give_back(self) -> None:
        """Give one back that no client has seen."""
        if (message := self.held()) is not None and message.lease is not None:
            with self.bench.consumer.begin() as connection:
                settlement.give_back(connection, "outbox", [message.lease._lease])
            self.old.append((message, message.lease))
            message.ends(failed=False)

    def pass_time(self) -> None:
        """Have the leases and delays of some end."""
        for message in self.messages:
            if message.state != "open" or self.dice.random() < 0.5:
                continue
            with self.bench.consumer.begin() as connection:
                connection.execute(
                    text(
                        "UPDATE outbox.consumer_message SET next_attempt_at = clock_timestamp() - interval '2 s'"
                        " WHERE message_id = :id AND next_attempt_at IS NOT NULL"
                    ),
                    {"id": message.id},
                )
            message.delayed = False
            if message.lease is not None:
                message.lapsed = True
                self.old.append((message, message.lease))
                message.ends(failed=False)

    def say_late(self) -> None:
        """Say something under a lease that has ended: it changes nothing, and says so."""
        if not self.old:
            return
        message, lease = self.dice.choice(self.old)
        if message.acked is lease:
            assert lease.acknowledge() is False
            assert self.say("acknowledge(%s)", lease.handle) is False
            return
        words: tuple[Callable[[], Any], ...] = (lease.acknowledge, lambda: lease.extend(1), lambda: lease.fail("late"))
        with pytest.raises(LeaseEnded):
            self.dice.choice(words)()

    def reset(self) -> None:
        """Have the group read all of it again, whatever became of it; leases of before are none."""
        if not self.messages:
            return
        self.bench.sink.operator.reset_group("g", "t", "first", by="me", why="test")
        for message in self.messages:
            if message.lease is not None:
                self.old.append((message, message.lease))
            message.state, message.attempts, message.acked, message.lease = "open", 0, None, None
            message.lapsed = message.tried = message.delayed = False
            message.take_id = None
        self.takes += 1
        taken = self.groups[0].take(1000, invisible=_LONG, taker="walk", take_id=f"take-{self.takes}")
        got = [self.found(each.message.id) for each in taken]
        assert set(got) == set(self.messages)
        for key in "abcd" if self.rule else "":
            assert [each for each in got if each.key == key] == [each for each in self.messages if each.key == key]
        for message, each in zip(got, taken, strict=True):
            assert each.attempt == 1
            message.lease, message.take_id = each, f"take-{self.takes}"
            message.handed_out = message.take_id

    # --- the whole ---------------------------------------------------------------------------------------------------

    def found(self, id_: UUID) -> ModelMessage:
        """Return the model of a message."""
        return next(each for each in self.messages if each.id == id_)

    def compare(self) -> None:
        """Compare the inbox with the model, row by row."""
        for id_, row in self.bench.inbox().items():
            message = self.found(id_)
            states = {"open": {"taken"} if message.lease or message.lapsed else {"failed", "waiting"}}
            assert row.status in states.get(message.state, {message.state}), (message, row)
            assert row.attempts == message.attempts, (message, row)

    def step(self) -> None:
        """Do one thing."""
        steps: dict[Callable[[], None], float] = {
            self.send: 3, self.take: 6, self.repeat: 1, self.acknowledge: 5, self.extend: 1, self.fail: 2,
            self.give_back: 1, self.pass_time: 1, self.say_late: 2, self.reset: 0.15,
        }  # fmt: skip
        (step,) = self.dice.choices(list(steps), list(steps.values()))
        step()
        self.compare()

    def finish(self) -> None:
        """Take and acknowledge until nothing is left; count what is settled."""
        for _ in range(len(self.messages) * _ATTEMPTS + 10):
            for message in self.messages:
                if message.lease is not None:
                    assert message.lease.acknowledge()
                    message.state, message.acked = "consumed", message.lease
                    message.attempts += 1
                    message.ends(failed=False)
            if not any(self.expected()) and not any(each.delayed for each in self.messages):
                break
            with self.bench.consumer.begin() as connection:
                ended = "UPDATE outbox.consumer_message SET next_attempt_at = clock_timestamp() - interval '2 s'"
                connection.execute(text(f"{ended} WHERE next_attempt_at IS NOT NULL"))
            for message in self.messages:
                message.delayed = False
            self.take(1000)
            self.compare()
        left = [each for each in self.messages if each.state == "open"]
        assert not left or self.rule == "park"
        assert all(any(each.state == "parked" and each.key == one.key for each in self.messages) for one in left)


@pytest.mark.parametrize("rule", [None, "skip", "park"])
@pytest.mark.parametrize("seed", range(tries(2)))
def test_a_random_walk(rule: str | None, seed: int, bench: Bench) -> None:
    """Each step does what the model says, and in the end each message is consumed or parked, once."""
    walk = LeaseWalk(bench, seed, rule)
    for _ in range(150):
        walk.step()
    walk.finish()
