"""An outbox on a database of the test's own, with a table for what handlers do."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, Settings
from tests.testing.shop import POINTS


@pytest.fixture
def shop(engine: Engine, settings: Settings) -> Outbox:
    """An outbox with a table of points."""
    with engine.begin() as connection:
        connection.execute(text(POINTS))
    return Outbox(engine, settings=settings)
