"""Processes that repair, to be killed at any moment: each is forked from one that has imported all."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection as Pipe
from uuid import UUID

from sqlalchemy import create_engine

from outbox.reconcile import repair
from outbox.reconcile.job import Job
from outbox.reconcile.rows import Finding
from tests.check.killed import Stops

Order = tuple[Job, UUID, list[Finding], int, int]


def serve(pipe: Pipe) -> None:
    """Repair in a process of its own each time the parent says what; say when that is gone, once the parent asks."""
    while True:
        order: Order = pipe.recv()
        if (pid := os.fork()) == 0:
            _repair(pipe, *order)
            os._exit(0)
        pipe.recv()  # until then its number belongs to it, dead or not: the parent may kill it
        os.waitpid(pid, 0)
        pipe.send(("gone", 0))


def _repair(pipe: Pipe, job: Job, run_id: UUID, findings: list[Finding], batch: int, after: int) -> None:
    repair.BATCH = batch
    producer, consumer = create_engine(job.producer.url), create_engine(job.consumer.url)
    stops = Stops(pipe)
    stops.where = str(os.getpid())
    if after == 0:
        pipe.send(("begins", stops.where))
    stops.arm(after)
    repair.repair(job, job.pairs[0], run_id, findings, producer, consumer)
    stops.arm(0)
    pipe.send(("ended", stops.where))


class Repairer:
    """What forks the processes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, order: Order) -> tuple[str, int]:
        """Have a repair begin; return what it says first, and its process: "begins", or "stopped", or "ended"."""
        self._pipe.send(order)
        return self._say()

    def kill(self, pid: int) -> bool:
        """Kill a repair, and wait for its end; was it still at work?"""
        os.kill(pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> bool:
        """Wait until a repair is gone; was it killed before its end?"""
        self._pipe.send("gone?")
        said = [self._say()[0]]
        while said[-1] != "gone":
            said.append(self._say()[0])
        return "ended" not in said

    def close(self) -> None:
        """Kill what forks."""
        self._process.kill()
        self._process.join()

    def _say(self) -> tuple[str, int]:
        assert self._pipe.poll(60), "the process neither stops nor ends"
        said, where = self._pipe.recv()
        return said, int(where)
