"""Our server as a process of its own, with a worker in it: ``python -m … OPTIONS TOLD PORT PORT``.

It listens in plaintext and with TLS, and writes where into the file ``TOLD``; 0 takes a free port.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from sqlalchemy import create_engine

from outbox import Outbox, Settings
from outbox.rocketmq.options import RocketmqOptions
from outbox.rocketmq.server import Listen, RocketmqServer
from outbox.worker import Worker


def certificate(folder: Path) -> tuple[str, str]:
    """Make a certificate that no client knows, and its key; return their paths."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ("-subj", "/CN=localhost", "-days", "2")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, "-keyout", key, "-out", cert)
    subprocess.run(command, check=True, capture_output=True)
    return str(cert), str(key)


def main() -> None:
    """Serve until SIGTERM."""
    options, told = map(Path, sys.argv[1:3])
    plain, tls = map(int, sys.argv[3:])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    engine = create_engine(os.environ["OUTBOX_DATABASE_URL"])
    outbox = Outbox(engine, settings=Settings.from_env())
    cert, key = certificate(told.parent)
    listen = [Listen(port=plain), Listen(port=tls, cert=cert, key=key)]
    server = RocketmqServer(outbox, RocketmqOptions.of_file(options), listen)
    server.start()
    worker = Worker(outbox)
    threading.Thread(target=worker.run, daemon=True).start()
    written = told.with_suffix(".part")
    written.write_text("\n".join(server.addresses))
    written.rename(told)
    stopping.wait()
    server.stop()


if __name__ == "__main__":
    main()
