"""The arms of pgmq, PgQueuer, procrastinate and faststream-outbox, as their documentation has them used.

Where a library may run several handlers at once, its arms for batches have ten at once, each with a connection; a
transaction is committed for each message, since none of the three task queues has another way.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import psycopg

from benchmarks.peers.business import (
    CREDIT,
    CREDIT_ASYNCPG,
    ONCE,
    ONCE_ASYNCPG,
    asyncpg_url,
    libpq_url,
    new_order,
)
from benchmarks.peers.contest import Arm

AT_ONCE = 10
#: The effect of a message: takes its id, and its body.
Effect = Callable[[str, dict[str, Any]], Awaitable[None]]


class PgmqArms:
    """pgmq: its SQL is that of the extension, which its client brings; read, effect and delete are one transaction."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        from pgmq import PGMQueue
        from pgmq.install import get_embedded_install_sql, install_pgmq_sql

        address = libpq_url(url)
        install_pgmq_sql(get_embedded_install_sql(), dsn=address)
        self._queue = PGMQueue(conn_string=address, pool_size=1, init_extension=False)
        stack.callback(self._queue.close)
        self._connection: psycopg.Connection[Any] = stack.enter_context(psycopg.connect(address))
        self._count = 0

    def arm(self, limit: int, *, effect: bool = True) -> Arm:
        """Return the arm that reads so many messages a transaction."""
        self._count += 1
        name, connection = f"work_{self._count}", self._connection
        self._queue.create_queue(name)

        def handle(messages: int) -> None:
            done = 0
            while done < messages:
                found: Any = self._queue.read_batch(name, vt=60, batch_size=limit, conn=connection)
                for message in found if effect else ():
                    body = message.message
                    connection.execute(ONCE, (str(message.msg_id),))
                    connection.execute(CREDIT, (body["amount"], body["receiver"]))
                self._queue.delete_batch(name, [message.msg_id for message in found], conn=connection)
                connection.commit()
                done += len(found)

        def fill(messages: int) -> None:
            self._queue.send_batch(name, [new_order() for _ in range(messages)])

        return Arm(fill, handle)


class AsyncArms:
    """What the task queues have in common: an event loop, and connections by asyncpg for the effects."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        import asyncpg

        self.url = url
        self.runner = stack.enter_context(asyncio.Runner())
        self.pool: Any = None
        self.runner.run(self._connect(asyncpg.create_pool(libpq_url(url), min_size=AT_ONCE, max_size=AT_ONCE)))
        stack.callback(lambda: self.runner.run(self.pool.close()))

    async def _connect(self, pool: Any) -> None:
        self.pool = await pool

    async def credit(self, message_id: str, body: dict[str, Any]) -> None:
        """Have a message take effect, in a transaction."""
        async with self.pool.acquire() as connection, connection.transaction():
            await connection.execute(ONCE_ASYNCPG, message_id)
            await connection.execute(CREDIT_ASYNCPG, body["amount"], body["receiver"])

    async def nothing(self, message_id: str, body: dict[str, Any]) -> None:
        """Do nothing."""


class PgQueuerArms(AsyncArms):
    """PgQueuer."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        import asyncpg
        from pgqueuer.queries import Queries

        super().__init__(url, stack)
        logging.getLogger("pgqueuer").setLevel(logging.ERROR)
        self._driver = self.runner.run(asyncpg.connect(libpq_url(url)))
        stack.callback(lambda: self.runner.run(self._driver.close()))
        self._queries: Any = Queries.from_asyncpg_connection(self._driver)
        self.runner.run(self._queries.install())

    def arm(self, effect: Effect, *, batch: int, at_once: int) -> Arm:
        """Return the arm that dequeues so many at a time."""
        from pgqueuer import PgQueuer
        from pgqueuer.types import QueueExecutionMode

        async def run() -> None:
            queuer = PgQueuer.from_asyncpg_connection(self._driver)
            free = asyncio.Semaphore(at_once)

            @queuer.entrypoint("till")
            async def till(job: Any) -> None:
                async with free:
                    await effect(str(job.id), json.loads(job.payload))

            await queuer.qm.run(batch_size=batch, mode=QueueExecutionMode.drain)

        async def fill(messages: int) -> None:
            bodies = [json.dumps(new_order()).encode() for _ in range(messages)]
            await self._queries.enqueue(["till"] * messages, bodies, [0] * messages)

        return Arm(lambda messages: self.runner.run(fill(messages)), lambda _: self.runner.run(run()))


class ProcrastinateArms(AsyncArms):
    """procrastinate."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        import procrastinate

        super().__init__(url, stack)
        logging.getLogger("procrastinate").setLevel(logging.ERROR)
        connector = procrastinate.PsycopgConnector(conninfo=libpq_url(url), min_size=1, max_size=4)
        self._app = procrastinate.App(connector=connector)
        self.runner.run(self._open())
        stack.callback(lambda: self.runner.run(self._app.close_async()))
        self._count = 0

    async def _open(self) -> None:
        await self._app.open_async()
        await self._app.schema_manager.apply_schema_async()

    def arm(self, effect: Effect, *, at_once: int) -> Arm:
        """Return the arm that runs so many tasks at once."""
        self._count += 1
        queue = f"work_{self._count}"

        async def till(context: Any, /, **body: Any) -> None:
            await effect(str(context.job.id), body)

        task = self._app.task(queue=queue, name=queue, pass_context=True)(till)

        async def run() -> None:
            await self._app.run_worker_async(
                queues=[queue],
                wait=False,
                concurrency=at_once,
                install_signal_handlers=False,
                listen_notify=False,
                delete_jobs="successful",
            )

        async def fill(messages: int) -> None:
            await task.batch_defer_async(*[new_order() for _ in range(messages)])

        return Arm(lambda messages: self.runner.run(fill(messages)), lambda _: self.runner.run(run()))


class FaststreamArms(AsyncArms):
    """faststream-outbox, whose rows are handled in place."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        from faststream_outbox import make_outbox_table
        from sqlalchemy import MetaData
        from sqlalchemy.ext.asyncio import create_async_engine

        super().__init__(url, stack)
        self._engine = create_async_engine(asyncpg_url(url), pool_size=AT_ONCE)
        stack.callback(lambda: self.runner.run(self._engine.dispose()))
        metadata = MetaData()
        self._table = make_outbox_table(metadata, table_name="relay")
        self.runner.run(self._create(metadata))
        self._count = 0

    async def _create(self, metadata: Any) -> None:
        async with self._engine.begin() as connection:
            await connection.run_sync(metadata.create_all)

    def arm(self, effect: Effect, *, batch: int, at_once: int) -> Arm:
        """Return the arm that fetches so many at a time, for so many workers."""
        from faststream_outbox import OutboxBroker

        self._count += 1
        queue = f"work_{self._count}"
        left, handled = 0, asyncio.Event()

        def new_broker() -> Any:
            broker = OutboxBroker(self._engine, outbox_table=self._table, logger=None)

            @broker.subscriber(queue, max_workers=at_once, fetch_batch_size=batch, min_fetch_interval=0.01)
            async def till(body: dict[str, Any]) -> None:
                nonlocal left
                await effect(body["id"], body)
                left -= 1
                if left == 0:
                    handled.set()

            return broker

        async def run(messages: int) -> None:
            nonlocal left
            left = messages
            handled.clear()
            broker = new_broker()
            await broker.start()
            await handled.wait()
            await broker.stop()

        async def fill(messages: int) -> None:
            bodies = [new_order() | {"id": f"{queue}-{number}-{id(object())}"} for number in range(messages)]
            async with self._engine.begin() as connection:
                await new_broker().publish_batch(*bodies, queue=queue, session=connection)

        return Arm(lambda messages: self.runner.run(fill(messages)), lambda messages: self.runner.run(run(messages)))
