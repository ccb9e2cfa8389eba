"""A desk for the tests of bulk jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox.embedded import ServerLike
from tests.operator.acting import Desk, open_desk


@pytest.fixture(scope="module")
def _desk(server: ServerLike, template: str) -> Iterator[Desk]:
    with open_desk(server, template, "bank") as opened:
        yield opened


@pytest.fixture
def desk(_desk: Desk) -> Desk:
    """A desk over one database that is the producer's and the consumer's, with nothing on it."""
    _desk.run(
        "TRUNCATE outbox.consumer_message, outbox.bulk_job, outbox.bulk_item, outbox.audit, outbox.half_message,"
        " outbox.half_check, outbox.op_message, outbox.message, outbox.scheduled_message, outbox.compensation"
    )
    return _desk
