"""What an `Outbox` is bound to, and what it needs of that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.errors import TransactionRequired

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    Bind = Engine | AsyncEngine | sessionmaker[Session] | async_sessionmaker[AsyncSession]


def factories(bind: Bind) -> tuple[Engine | AsyncEngine, Engine, Any, Any]:
    """Return (engine, its sync engine, sync session factory, async session factory).

    Raises:
        TransactionRequired: it isn't an engine or a session factory on one.
    """
    from sqlalchemy import Engine  # noqa: PLC0415
    from sqlalchemy.orm import sessionmaker  # noqa: PLC0415

    if isinstance(bind, Engine):
        return bind, bind, sessionmaker(bind, expire_on_commit=False), None
    if isinstance(bind, sessionmaker):
        engine = bind.kw.get("bind")
        if not isinstance(engine, Engine):
            raise TransactionRequired(f"the sessionmaker must be bound to an engine, not {engine!r}")
        return engine, engine, bind, None
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker  # noqa: PLC0415

    if isinstance(bind, AsyncEngine):
        return bind, bind.sync_engine, None, async_sessionmaker(bind, expire_on_commit=False)
    if isinstance(bind, async_sessionmaker):
        engine = bind.kw.get("bind")
        if not isinstance(engine, AsyncEngine):
            raise TransactionRequired(f"the async_sessionmaker must be bound to an AsyncEngine, not {engine!r}")
        return engine, engine.sync_engine, None, bind
    raise TransactionRequired(f"an Outbox is bound to an engine or a session factory, not {bind!r}")
