"""Page tokens, and lists put together of those of several databases."""

from __future__ import annotations

import base64
import datetime as dt
import random
from dataclasses import dataclass
from uuid import UUID

import pytest

from outbox.errors import InvalidRequest
from outbox.operator.look import paging
from outbox.operator.look.paging import Part, Position, SortOrder, decode, merged
from outbox.operator.model import MAX_PAGE, MessageFilter, Page, PageRequest, ScheduledFilter
from outbox.reader import plain
from tests.operator.looking import all_pages, born, id_of

CURSOR = {"north": ["2026-01-01", 7], "south": None}
FILTER = MessageFilter(topic="orders", since=born(0))


@dataclass(frozen=True)
class Item:
    key: int
    id: int
    owner: str


BY_KEY: SortOrder[Item] = SortOrder(key=lambda item: (item.key, item.id), shape=(int, int))
OLDEST_FIRST: SortOrder[Item] = SortOrder(key=lambda item: (item.key, item.id), shape=(int, int), newest_first=False)


def test_what_is_written_is_read() -> None:
    """A token gives back what it was made of, for an equal filter; no token is the beginning."""
    token = paging.write_token(CURSOR, FILTER)
    assert paging.read_token(token, MessageFilter(topic="orders", since=born(0))) == CURSOR
    assert token.replace("-", "").replace("_", "").isalnum()
    assert paging.read_token(None, FILTER) is paging.read_token("", FILTER) is None


@pytest.mark.parametrize(
    "other",
    [
        MessageFilter(topic="orders"),
        MessageFilter(topic="Orders", since=born(0)),
        ScheduledFilter(topic="orders"),
        None,
    ],
)
def test_a_token_is_of_one_list(other: object) -> None:
    """A token of another filter, or of a filter of another list, is refused."""
    with pytest.raises(InvalidRequest) as refused:
        paging.read_token(paging.write_token(CURSOR, FILTER), other)
    assert refused.value.field == "page_token"
    with pytest.raises(InvalidRequest):
        paging.read_token(paging.write_token(CURSOR, MessageFilter(topic="a")), ScheduledFilter(topic="a"))


def test_tampered_tokens_are_refused() -> None:
    """Whatever one character of a token is changed to, wherever it is cut, whatever is added: it is no token."""
    token = paging.write_token(CURSOR, FILTER)
    damaged = {token[:cut] for cut in range(1, len(token))} | {token + more for more in ("A", "=", " ", "é", "\0")}
    for place in range(len(token)):
        damaged |= {token[:place] + other + token[place + 1 :] for other in "Aa0-_=é\n" if other != token[place]}
    for text in damaged:
        with pytest.raises(InvalidRequest):
            paging.read_token(text, FILTER)


@pytest.mark.parametrize("payload", [b"[]", b"7", b"{", b"\xff", b"[" * 100_000, b"null", b'{"a":1}'])
def test_forged_tokens_are_refused(payload: bytes) -> None:
    """Whoever knows how the checksum is made gets no further than a list that begins elsewhere."""
    order: SortOrder[Item] = SortOrder(key=lambda item: (item.key,), shape=(int,))
    names = ["north"]
    forged = base64.urlsafe_b64encode(paging._checksum(payload, (names, FILTER)) + payload).rstrip(b"=").decode()
    with pytest.raises(InvalidRequest):
        merged(names, PageRequest(10, forged), FILTER, order, lambda *_: Part([]))


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        (["x"], (UUID,)), ([7], (UUID,)), (["7"], (int,)), ([2**63], (int,)), ([1.5], (int,)), ([True], (int,)),
        (["2026"], (dt.datetime,)), (["2026-01-01T00:00:00"], (dt.datetime,)), (["a\0b"], (str,)),
        (["\ud800"], (str,)), ([7], (str,)),
        ([], (str,)), (["a", "b"], (str,)), ({}, (str,)), ("a", (str,)), ([None], (str,)),
    ],
)  # fmt: skip
def test_positions_that_are_none(values: object, shape: tuple[type, ...]) -> None:
    """A position has as many values as its list needs, each of its type, and none that the database would refuse."""
    with pytest.raises(InvalidRequest):
        decode(values, shape)


def test_positions_survive_json() -> None:
    """Ids, times, numbers and texts come back as they went."""
    position = (id_of(1), born(1), 7, "till")
    assert decode(plain(position), (UUID, dt.datetime, int, str)) == position
    assert decode(plain(None), (int,)) is None


def test_page_sizes() -> None:
    """A page has at least one row; who asks for too many gets as many as there may be."""
    assert paging.size_of(PageRequest(MAX_PAGE + 1)) == MAX_PAGE
    for size in (0, -1):
        with pytest.raises(InvalidRequest) as refused:
            paging.size_of(PageRequest(size))
        assert refused.value.field == "page_size"


class Lists:
    """Lists of several databases with many ties, looked at within a window; only odd items fit."""

    def __init__(self, seed: int, order: SortOrder[Item], window: int = 1_000) -> None:
        chance = random.Random(seed)  # noqa: S311
        self.order = order
        self.window = window
        self.lists = {
            owner: sorted(
                (Item(chance.randrange(6), number, owner) for number in range(chance.randrange(12))),
                key=order.key,
                reverse=order.newest_first,
            )
            for owner in ("north", "south", "west")
        }

    @property
    def fitting(self) -> list[Item]:
        """What is to be found, in order."""
        rows = [row for name in sorted(self.lists) for row in self.lists[name] if row.id % 2]
        return sorted(rows, key=self.order.key, reverse=self.order.newest_first)

    def page(self, page: PageRequest) -> Page[Item]:
        """Return a page of all."""
        return merged(self.lists, page, FILTER, self.order, self._look)

    def _look(self, name: str, after: Position | None, limit: int) -> Part[Item]:
        rows = self.lists[name]
        if after is not None:
            rows = [row for row in rows if after != self.order.key(row) and self._is_behind(self.order.key(row), after)]
        seen = rows[: self.window]
        fitting = [row for row in seen if row.id % 2][:limit]
        stopped = len(fitting) < limit and len(rows) > len(seen)
        return Part(fitting, len(seen), self.order.key(seen[-1]) if stopped else None)

    def _is_behind(self, key: Position, after: Position) -> bool:
        return (key < after) == self.order.newest_first


@pytest.mark.parametrize("order", [BY_KEY, OLDEST_FIRST], ids=["newest first", "oldest first"])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_merged_lists(order: SortOrder[Item], size: int) -> None:
    """The pages of several databases are one list: each row once, in order, ties by the database's name."""
    for seed in range(30):
        lists = Lists(seed, order)
        assert all_pages(lists.page, size) == lists.fitting


@pytest.mark.parametrize("window", [1, 2, 4])
def test_merged_windows(window: int) -> None:
    """Searches that stop at their windows miss nothing, repeat nothing, and come to an end."""
    for seed in range(30):
        lists = Lists(seed, BY_KEY, window)
        rows = all_pages(lists.page, 3)
        assert len(rows) == len(set(rows))
        assert set(rows) == set(lists.fitting)


def test_databases_of_a_token() -> None:
    """A list goes on in the databases in which it began: with others registered, it begins again."""
    lists = Lists(1, BY_KEY)
    token = lists.page(PageRequest(1)).next_page_token
    del lists.lists["west"]
    with pytest.raises(InvalidRequest):
        lists.page(PageRequest(1, token))
