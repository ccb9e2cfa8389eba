"""What a message may look like, at the very limit and one over it."""

from __future__ import annotations

import datetime as dt
import enum
import math
import re
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.errors import InvalidMessage
from outbox.message import content
from outbox.settings import DELAY_LEVELS

NAME = re.compile(r"[%|a-zA-Z0-9_./-]{1,127}\Z")


class Topic(enum.StrEnum):
    ORDERS = "orders"


class Old(str, enum.Enum):  # noqa: UP042 - as it was written before StrEnum
    ORDERS = "orders"


@pytest.mark.parametrize(
    "name", ["a", "%|-_", "orders.created", "shop/orders", "a" * 127, "RETRY", "x%RETRY%", "DLQ", "TBW1020"]
)
def test_topics(name: str) -> None:
    """RocketMQ's rule, with dots and slashes: 1 to 127 of ``[%|a-zA-Z0-9_./-]``."""
    assert content.check_topic(name) == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "topic is empty"),
        ("a" * 128, "has 128 characters; at most 127"),
        ("a b", "topic 'a b' may only have"),
        ("a:b", "may only have"),
        ("a\n", "may only have"),
        ("ä", "may only have"),
        ("٣", "may only have"),
        ("a\0", "may only have"),
        ("TBW102", "'TBW102' is a system name"),
        ("SELF_TEST_TOPIC", "is a system name"),
        ("RMQ_SYS_TRANS_HALF_TOPIC", "is a system name"),
        ("rmq_sys_x", "is a system name"),
        ("%RETRY%group", "is a system name"),
        ("%DLQ%group", "is a system name"),
        ("SCHEDULE_TOPIC_XXXX", "is a system name"),
        ("TRANS_CHECK_MAX_TIME_TOPIC", "is a system name"),
        ("outbox.delivered", "names that begin with 'outbox.' are those of internal topics"),
        (None, "topic must be a str, not NoneType"),
        (b"t", "topic must be a str, not bytes"),
        (1, "topic must be a str, not int"),
    ],
)
def test_topics_refused(name: Any, said: str) -> None:
    """Every other name is refused, with the rule that it breaks."""
    with pytest.raises(InvalidMessage, match=said):
        content.check_topic(name)


@given(st.text(max_size=140))
def test_any_text_is_a_topic_or_refused(name: str) -> None:
    """No text gets through that isn't a name, and no name is refused but a system's."""
    try:
        content.check_topic(name)
    except InvalidMessage as error:
        assert not NAME.match(name) or "system name" in str(error)
    else:
        assert NAME.match(name)


def test_groups() -> None:
    """A group has at most 120 characters of the same set; system names are only for topics."""
    assert content.check_group("a" * 120) == "a" * 120
    assert content.check_group("%RETRY%") == "%RETRY%"
    with pytest.raises(InvalidMessage, match=r"group 'aaaa.*has 121 characters; at most 120"):
        content.check_group("a" * 121)


@pytest.mark.parametrize("value", ["", "a" * 255, "ä" * 127 + "a", "\N{PILE OF POO}" * 63 + "abc", None])
def test_keys(value: str | None) -> None:
    """A key has at most 255 bytes of UTF-8."""
    assert content.check_text("key", value, 255) == value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("a" * 256, "key 'aaa.*has 256 bytes; at most 255"),
        ("ä" * 128, "has 256 bytes; at most 255"),
        ("\N{PILE OF POO}" * 64, "has 256 bytes; at most 255"),
        ("a\0b", "key has a NUL character"),
        ("\ud800", "key has a character that UTF-8 can't hold"),
        (7, "key must be a str, not int: 7"),
        (b"k", "key must be a str, not bytes"),
        (True, "key must be a str, not bool"),
    ],
)
def test_keys_refused(value: Any, said: str) -> None:
    """Longer, NUL, half a character and anything but str is refused."""
    with pytest.raises(InvalidMessage, match=said):
        content.check_text("key", value, 255)


@pytest.mark.parametrize("given_name", [Topic.ORDERS, Old.ORDERS])
def test_enum_members_are_names(given_name: str) -> None:
    """A member of a str enum counts as its value, and as nothing but a plain str for the driver."""
    for checked in (
        content.check_topic(given_name),
        content.check_group(given_name),
        content.check_text("key", given_name, 9),
    ):
        assert checked == "orders"
        assert type(checked) is str
    assert {type(part) for item in content.check_headers({given_name: given_name}).items() for part in item} == {str}


@pytest.mark.parametrize(
    "headers", [None, {}, {"a": "b"}, {"": ""}, MappingProxyType({"ä": "€"}), {"x" * 8192: "y" * 8192}]
)
def test_headers(headers: Any) -> None:
    """Any mapping of text to text will do, up to 16 KiB."""
    assert content.check_headers(headers) == dict(headers or {})
    assert len(content.check_headers({str(n): "" for n in range(128)})) == 128


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({str(n): "" for n in range(129)}, "129 headers; at most 128"),
        ({"x": "y" * 16384}, "have 16385 bytes; at most 16384"),
        ({"ä" * 4096: "ä" * 4097}, "have 16386 bytes"),
        ({"a": 1}, "header 'a' must be text, not int: 1"),
        ({"a": None}, "header 'a' must be text, not NoneType"),
        ({1: "a"}, "header 1 must be text"),
        ({"a": b"b"}, "header 'a' must be text, not bytes"),
        ({"a": "\0"}, "header 'a' has a NUL"),
        ({"\0": "a"}, "has a NUL"),
        ({"a": "\ud800"}, "header 'a' has a character"),
        (["a"], "headers must be a mapping of str to str, not list"),
        ("a=b", "headers must be a mapping of str to str, not str"),
        ([("a", "b")], "headers must be a mapping of str to str, not list"),
        (1, "headers must be a mapping of str to str, not int"),
    ],
)
def test_headers_refused(headers: Any, said: str) -> None:
    """Too many, too long, not text, NUL and half a character are refused by the header's name."""
    with pytest.raises(InvalidMessage, match=said):
        content.check_headers(headers)


LATER = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)


def test_delivery() -> None:
    """One way at most; levels are RocketMQ's, in seconds, the last one for all above; a moment stays that moment."""
    assert content.check_delivery(None, None, None, DELAY_LEVELS) == (None, None)
    assert content.check_delivery(LATER, None, None, DELAY_LEVELS) == (LATER, None)
    assert content.check_delivery(None, 0, None, DELAY_LEVELS) == (None, 0.0)
    assert content.check_delivery(None, dt.timedelta(minutes=1), None, DELAY_LEVELS) == (None, 60.0)
    of_rocketmq = {1: 1, 2: 5, 3: 10, 5: 60, 14: 600, 18: 7200, 19: 7200, 2**70: 7200}
    assert {level: content.check_delivery(None, None, level, DELAY_LEVELS)[1] for level in of_rocketmq} == of_rocketmq
    assert [content.check_delivery(None, None, level, (0, 2.5))[1] for level in (1, 2, 3)] == [0, 2.5, 2.5]
    past = dt.datetime(1999, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5)))
    assert content.check_delivery(past, None, None, DELAY_LEVELS) == (past, None)


class NoOffset(dt.tzinfo):
    def tzname(self, _: dt.datetime | None) -> None:
        return None

    def dst(self, _: dt.datetime | None) -> None:
        return None

    def utcoffset(self, _: dt.datetime | None) -> None:
        return None


@pytest.mark.parametrize(
    ("deliver_at", "delay", "level", "said"),
    [
        (LATER, 1, None, "deliver_at and delay exclude each other"),
        (LATER, None, 1, "deliver_at and delay_level exclude each other"),
        (None, 1, 1, "delay and delay_level exclude each other"),
        (LATER, 0, 1, "deliver_at and delay and delay_level exclude each other"),
        (dt.datetime(2030, 1, 1), None, None, "2030-01-01T00:00:00 has no time zone; add one"),  # noqa: DTZ001
        (dt.datetime(2030, 1, 1, tzinfo=NoOffset()), None, None, "has no time zone"),
        (dt.date(2030, 1, 1), None, None, "deliver_at must be a datetime, not date"),
        ("2030-01-01T00:00:00Z", None, None, "deliver_at must be a datetime, not str"),
        (1893456000, None, None, "deliver_at must be a datetime, not int"),
        (dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-5))), None, None, "deliver_at 9999.*range"),
        (dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=5))), None, None, "deliver_at 0001.*range"),
        (None, -1, None, "delay -1 must be"),
        (None, -0.001, None, "delay -0.001 must be"),
        (None, dt.timedelta(seconds=-1), None, "must be a timedelta or seconds, not negative"),
        (None, dt.timedelta.max, None, "under 100 years"),
        (None, math.nan, None, "delay nan must be"),
        (None, math.inf, None, "delay inf must be"),
        (None, 1e300, None, "under 100 years"),
        (None, True, None, "delay True must be"),
        (None, "5", None, "delay '5' must be"),
        (None, Decimal(5), None, "delay Decimal"),
        (None, None, 0, "delay_level 0 is unknown; levels are 1 to 18"),
        (None, None, -1, "delay_level -1 is unknown"),
        (None, None, 1.0, "delay_level 1.0 is unknown"),
        (None, None, "3", "delay_level '3' is unknown"),
        (None, None, True, "delay_level True is unknown"),
    ],
)
def test_delivery_refused(deliver_at: Any, delay: Any, level: Any, said: str) -> None:
    """Every other delivery is refused, with the value and the rule."""
    with pytest.raises(InvalidMessage, match=said):
        content.check_delivery(deliver_at, delay, level, DELAY_LEVELS)


class OwnDatetime(dt.datetime):
    """As pandas, pendulum and time machines have them."""


@given(st.datetimes(min_value=dt.datetime(2, 1, 1), max_value=dt.datetime(9998, 1, 1), timezones=st.timezones()))  # noqa: DTZ001
def test_moments_are_handed_on_exactly(moment: dt.datetime) -> None:
    """A moment in any time zone, of any subclass, is the same moment as a plain datetime for the driver."""
    own = OwnDatetime.fromisoformat(moment.isoformat())
    for given_moment in (moment, own):
        checked, delay = content.check_delivery(given_moment, None, None, DELAY_LEVELS)
        # Not `== moment`: a time that the clocks skipped equals no moment in another zone, by PEP 495.
        assert checked == moment.astimezone(dt.UTC)
        assert type(checked) is dt.datetime
        assert delay is None
