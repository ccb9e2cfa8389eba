"""What Debezium sees of messages while it is killed: ``python -m tests.relay.capturing 10000 2``, killed twice.

As many messages are rolled back, or left undecided, as are committed: whole transactions, savepoints, prepared halves.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from outbox import Outbox, Worker, embedded
from outbox.database import migration
from outbox.relay import PublishedTable
from tests.kit import wait_until
from tests.relay.debezium import Debezium, RoutedEvent, compiled, slot

#: Messages of a transaction, and keys that they have.
_TOGETHER, _KEYS = 20, 50


@contextmanager
def logical_server() -> Iterator[embedded.Server]:
    """Run a PostgreSQL whose WAL can be decoded, with the database ``shop``."""
    with embedded.Server(durable=False, settings={"wal_level": "logical"}) as server:
        server.create_database("shop")
        migration.upgrade(server.url("shop"))
        yield server


@dataclass
class Sent:
    """What was sent: the bodies of what was committed, by id, in the order of each key; and what was not."""

    committed: dict[UUID, bytes] = field(default_factory=dict)
    keys: dict[str, list[UUID]] = field(default_factory=dict)
    never: set[UUID] = field(default_factory=set)


def send(app: Outbox, engine: Engine, count: int, sent: Sent, draw: random.Random) -> None:
    """Commit so many messages, and about as many not."""
    while len(sent.committed) < count:
        size = min(_TOGETHER, count - len(sent.committed))
        with Session(engine) as session:
            kept = _send_some(app, session, size, draw)
            session.commit()
            for id_, (key, body) in kept.items():
                sent.committed[id_] = body
                sent.keys.setdefault(key, []).append(id_)
            sent.never |= _send_in_vain(app, session, size, draw)


def _send_some(app: Outbox, session: Session, size: int, draw: random.Random) -> dict[UUID, tuple[str, bytes]]:
    some = [(f"k{draw.randrange(_KEYS)}", draw.randbytes(draw.randrange(200))) for _ in range(size)]
    return {app.send(session, "order-paid", body, key=key): (key, body) for key, body in some}


def _send_in_vain(app: Outbox, session: Session, size: int, draw: random.Random) -> set[UUID]:
    """Send what never takes effect, in one of the ways there are; return the ids."""
    match draw.choice(("rollback", "savepoint", "undecided", "rolled back", "rolled back by itself")):
        case "rollback":
            ids = set(_send_some(app, session, size, draw))
            session.rollback()
        case "savepoint":
            savepoint = session.begin_nested()
            ids = set(_send_some(app, session, size, draw))
            savepoint.rollback()
            session.commit()
        case "undecided":
            ids = {app.prepare(session, "order-paid", b"undecided", immunity=3600) for _ in range(size)}
            session.commit()
        case "rolled back":
            ids = {app.prepare(session, "order-paid", b"rolled back", immunity=3600) for _ in range(size)}
            session.commit()
            for each in ids:
                app.rollback(each)
        case _:
            ids = {app.prepare(session, "order-paid", b"rolled back", immunity=3600) for _ in range(size)}
            session.rollback()
    return ids


@dataclass(frozen=True)
class Seen:
    """What Debezium has delivered, compared with what was sent."""

    committed: int
    never: int
    events: int
    missing: int
    undecided: int
    repeated: int
    changed: int
    out_of_order: int


def compare(sent: Sent, events: list[RoutedEvent]) -> Seen:
    """Compare; an event is out of order where the first of its id comes before that of an earlier one of its key."""
    first: dict[UUID, RoutedEvent] = {}
    for event in events:
        first.setdefault(UUID(event.id), event)
    contents = Counter((UUID(event.id), event.key, event.value) for event in events)
    in_order: dict[str, list[UUID]] = {}
    for id_, event in first.items():
        in_order.setdefault(str(event.key), []).append(id_)
    return Seen(
        committed=len(sent.committed),
        never=len(sent.never),
        events=len(events),
        missing=len(sent.committed.keys() - first.keys()),
        undecided=len(first.keys() - sent.committed.keys()) + len(first.keys() & sent.never),
        repeated=len(events) - len(first),
        changed=sum(sent.committed.get(id_) != value for id_, _, value in contents) + len(contents) - len(first),
        out_of_order=sum(in_order.get(key) != ids for key, ids in sent.keys.items()),
    )


def capture(folder: Path, url: str, class_path: str, count: int, kills: int = 2) -> Seen:
    """Send so many messages, relay them, and kill Debezium meanwhile: twice at a quarter and at three quarters."""
    engine, draw, sent = create_engine(url), random.Random(count), Sent()  # noqa: S311 - no secret
    app = Outbox(engine)
    app.relay("order-*", to=PublishedTable())
    debezium = Debezium(class_path, folder, url)
    try:
        with Worker(app), ThreadPoolExecutor(1) as sender:
            debezium.start()
            sending = sender.submit(send, app, engine, count, sent, draw)
            for number in range(1, 2 * kills, 2):
                _wait_for(debezium, count * number // (2 * kills))
                debezium.kill()
                debezium.start()
            sending.result()
            _wait_for(debezium, count)
    finally:
        debezium.kill()
        engine.dispose()
    return compare(sent, debezium.events)


def _wait_for(debezium: Debezium, ids: int) -> None:
    """Wait until so many have come, repetitions aside."""
    wait_until(lambda: debezium.count >= ids and len({each.id for each in debezium.events}) >= ids, f"{ids} have come")


def main(count: int, kills: int) -> None:
    """Print what came of so many messages."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name, logical_server() as server:
        folder, url = Path(name), server.url("shop")
        class_path = compiled(folder)
        with slot(url):
            print(capture(folder, url, class_path, count, kills))  # noqa: T201 - for the reader
    print(f"{time.monotonic() - begin:.0f} s")  # noqa: T201 - for the reader


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
