"""Compressed bodies: what is stored, and that nothing larger than allowed ever comes out of it."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.errors import InvalidMessage
from outbox.message.compression import compress, decompress
from outbox.message.content import Codecs
from outbox.message.model import read_headers

LIMIT = 1 << 20
BODY = json.dumps({"lines": list(range(1000))}).encode()


@given(raw=st.binary(max_size=2000) | st.binary(min_size=1, max_size=20).map(lambda part: part * 1000))
def test_what_is_compressed_comes_back(raw: bytes) -> None:
    """Every body, the same bytes each time; never larger than it was."""
    stored, encoding = compress(raw)
    assert (stored, encoding) == compress(raw)
    assert len(stored) <= len(raw)
    assert (encoding is None) == (stored == raw)
    assert decompress(stored, encoding, LIMIT) == raw


def test_exactly_the_limit() -> None:
    """The limit counts for what comes out, to the byte."""
    stored, encoding = compress(BODY)
    assert decompress(stored, encoding, len(BODY)) == BODY
    with pytest.raises(InvalidMessage, match=rf"more than {len(BODY) - 1} bytes when .* \(setting max_body_bytes of"):
        decompress(stored, encoding, len(BODY) - 1)


def test_a_bomb_takes_no_more_than_the_limit() -> None:
    """A gibibyte of zeros is refused when a mebibyte of it is out."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1 << 20)
    bomb = b"".join([*(packer.compress(zeros) for _ in range(1024)), packer.flush()])
    tracemalloc.start()
    try:
        with pytest.raises(InvalidMessage, match=f"more than {LIMIT} bytes"):
            decompress(bomb, "gzip", LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 8 * LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("stored", "encoding", "said"),
    [
        (BODY, "gzip", "isn't the gzip that its header says"),
        (b"", "gzip", "ends too early"),
        (gzip.compress(BODY)[:-1], "gzip", "ends too early"),
        (gzip.compress(BODY) + b"more", "gzip", "too late"),
        (gzip.compress(BODY)[:-8] + bytes(8), "gzip", "isn't the gzip that its header says"),
        (BODY, "zstd", "encoded as 'zstd', and this release reads 'gzip' alone"),
        (BODY, "", "encoded as ''"),
    ],
)
def test_what_is_not_what_its_header_says(stored: bytes, encoding: str, said: str) -> None:
    """Damage, a part, and what a later release may write are errors of the message."""
    with pytest.raises(InvalidMessage, match=said):
        decompress(stored, encoding, LIMIT)


def test_the_header_is_taken_off() -> None:
    """Whoever reads a message sees the headers that its sender gave."""
    assert read_headers('{"a": "b", "outbox-encoding": "gzip"}') == ({"a": "b"}, "gzip")
    assert read_headers('{"a": "b"}') == ({"a": "b"}, None)
    assert read_headers(None) == ({}, None)


def test_without_an_outbox_the_limit_is_the_servers() -> None:
    """A body can't be larger than what PostgreSQL holds."""
    assert Codecs().max_body_bytes == 1 << 30
