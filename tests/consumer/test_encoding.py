"""Databases that don't hold every character: a failure is recorded all the same, and a key is refused clearly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url
from sqlalchemy.orm import Session

from outbox import Message, Park, Settings
from outbox.database import migration
from outbox.embedded import ServerLike
from outbox.errors import InvalidMessage
from tests.kit.bench import Bench, make_ledger

#: Encodings of a database, and of its client where that is another one.
ENCODINGS = ["LATIN1", "LATIN1 UTF8", "WIN1252", "WIN1252 UTF8", "UTF8 LATIN1", "EUC_JP UTF8", "SQL_ASCII UTF8"]
TEXT = "5 € für Łukasz, 五 \N{GRINNING FACE}, \0 and \ud800"


@pytest.fixture(scope="module", params=ENCODINGS)
def narrow(request: pytest.FixtureRequest, server: ServerLike) -> Iterator[Engine]:
    """An engine on a migrated database with another encoding."""
    encoding, _, client = request.param.partition(" ")
    name = f"narrow_{request.param.replace(' ', '_').lower()}"
    admin = create_engine(server.url(), isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with admin.connect() as connection:
        locale = "LC_COLLATE 'C' LC_CTYPE 'C'"
        connection.exec_driver_sql(f"CREATE DATABASE {name} ENCODING '{encoding}' {locale} TEMPLATE template0")
    url = make_url(server.url(name)).update_query_dict({"client_encoding": client} if client else {})
    migration.upgrade(url)
    engine = create_engine(url)
    make_ledger(engine)
    yield engine
    engine.dispose()
    server.drop_database(name)


@pytest.mark.parametrize("how", ["raise", "park", "kind"])
def test_a_failure_is_recorded(narrow: Engine, how: str) -> None:
    """Whatever characters an error has, its message is recorded as failed, also by a retry, and its queue goes on."""
    strange = type("Łeer", (RuntimeError,), {})

    def handler(message: Message, session: Session) -> object:
        if message.body == 2 and how != "park":
            raise (strange if how == "kind" else RuntimeError)(TEXT)
        return Park(TEXT) if message.body == 2 else None

    with Bench(narrow, narrow, Settings()) as bench:
        consumer = bench.declare(handler, topic=how, group=how)
        ids = [id_ for body in (1, 2, 3) for id_ in bench.send(body, topic=how)]
        bench.consume(consumer)
        bench.retry(consumer)
        rows = bench.inbox(how)
        assert [rows[id_].status for id_ in ids] == ["consumed", "parked" if how == "park" else "failed", "consumed"]
        assert " and " in str(rows[ids[1]].error)


@pytest.mark.parametrize("field", ["key", "tag", "headers"])
def test_a_text_that_the_database_cannot_hold(narrow: Engine, field: str) -> None:
    """A key, tag or header outside the encoding is one clear error at the send, which names it."""
    if "sql_ascii" in str(narrow.url):
        pytest.skip("the server takes any bytes")
    value: Any = {"who": "\N{GRINNING FACE}"} if field == "headers" else "\N{GRINNING FACE}"
    with Bench(narrow, narrow, Settings()) as bench:
        named = "header" if field == "headers" else field
        with pytest.raises(InvalidMessage, match=f"{named}.*can't be stored"), narrow.begin() as connection:
            bench.app.send(connection, "refused", 1, **{field: value})
        with pytest.raises(InvalidMessage, match=f"{named}.*can't be stored"), Session(narrow) as session:
            bench.app.send(session, "refused", 1, **{field: value})
            session.commit()
        assert bench.value("SELECT count(*) FROM outbox.half_message WHERE topic = 'refused'") == 0


def test_a_text_that_the_database_holds(narrow: Engine) -> None:
    """What the encoding has is stored and read as it is."""
    word = "五" if "euc_jp" in str(narrow.url) else "für"
    with Bench(narrow, narrow, Settings()) as bench:
        (id_,) = bench.send(1, topic="kept", key=word, headers={"who": word})
        sql = "SELECT key, headers ->> 'who' FROM outbox.half_message WHERE id = :id"
        assert bench.rows(sql, id=id_) == [(word, word)]
