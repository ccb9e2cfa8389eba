"""Large bodies as they are stored: compressed, with a header that says so. Everything that reads a body opens it first.

Bodies are compared as they are stored: digests are of the compressed bytes, in the producer's tables and in inboxes.
"""

from __future__ import annotations

import gzip
import zlib

from outbox.errors import InvalidMessage

_GZIP = "gzip"
#: zlib's number for a gzip stream, with its header and checksum.
_GZIP_BITS = 16 + zlib.MAX_WBITS


def compress(raw: bytes) -> tuple[bytes, str | None]:
    """Return a body as it is stored, and its encoding; None where it is no smaller compressed."""
    # Without the time, so that the same body is the same bytes and has the same digest.
    stored = gzip.compress(raw, mtime=0)
    return (stored, _GZIP) if len(stored) < len(raw) else (raw, None)


def decompress(stored: bytes, encoding: str | None, limit: int) -> bytes:
    """Return the body of stored bytes, of at most ``limit`` bytes, and never more than that in memory.

    Raises:
        InvalidMessage: the body is larger, isn't what its encoding says, or has one that this release doesn't know.
    """
    if encoding is None:
        return stored
    if encoding != _GZIP:
        raise InvalidMessage(
            f"the body is encoded as {encoding!r}, and this release reads {_GZIP!r} alone; deploy the release that "
            "wrote it"
        )
    reader = zlib.decompressobj(_GZIP_BITS)
    try:
        raw = reader.decompress(stored, limit + 1)
    except zlib.error as error:
        raise InvalidMessage(f"the body isn't the {_GZIP} that its header says: {error}") from None
    if len(raw) > limit:
        raise InvalidMessage(
            f"the body has more than {limit} bytes when it is decompressed (setting max_body_bytes of the reader): set "
            "it to at least that of the sender"
        )
    if not reader.eof or reader.unused_data:
        raise InvalidMessage(f"the body isn't the {_GZIP} that its header says: it ends too early, or too late")
    return raw
