"""Free ports, for servers that must be told theirs."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below those that a system hands out to outgoing connections, one of which may have such a port before its server has,
# and below those of the embedded PostgreSQL.
_PORTS = range(10_000, 20_000)
_GIVEN: set[int] = set()


def free_port() -> int:
    """Return a port that is free now, and that this process hasn't been given before."""
    for port in random.sample(_PORTS, 1_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):  # one that is taken is passed over
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port
    raise OSError(f"no port of 127.0.0.1 between {_PORTS.start} and {_PORTS.stop - 1} is free")
