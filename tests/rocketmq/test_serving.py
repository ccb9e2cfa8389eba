"""The server as a process: started by the command line, watched, killed, shared by several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from sqlalchemy import Engine, create_engine

from examples.bank_transfer.ports import free_port
from outbox import Outbox, Settings
from outbox.errors import InvalidSettings
from outbox.rocketmq.options import RocketmqOptions
from outbox.rocketmq.server import Listen, RocketmqServer
from tests.cli.conftest import run_cli
from tests.kit import wait_until
from tests.kit.passes import dispatch_all
from tests.kit.processes import python
from tests.kit.programs import program
from tests.rocketmq.conftest import NewServer
from tests.rocketmq.raw import RawClient, code, handle_of, message


def answer(port: int, path: str) -> tuple[int, str]:
    """Return what the HTTP endpoint of a process answers; 0 if there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


@contextmanager
def served(engine: Engine, *options: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Run ``outbox rocketmq serve``, once it is ready; yield it, its port, and that of its HTTP endpoint."""
    port, http = free_port(), free_port()
    at = ("--port", str(port), "--http", f"127.0.0.1:{http}")
    with python("outbox.cli", "rocketmq", "serve", "--url", engine, "--auto-create", *at, *options) as process:
        wait_until(lambda: answer(http, "/readyz")[0] == 200 or process.poll() is not None, "it is ready")
        assert process.poll() is None
        yield process, port, http


def test_a_process(engine: Engine) -> None:
    """It serves, tells how it fares and which clients are there, and ends in good order by SIGTERM."""
    url = ("--url", engine.url.render_as_string(hide_password=False))
    with served(engine) as (process, port, http), RawClient(f"127.0.0.1:{port}") as raw:
        assert code(raw.send(message("orders"))) == 20000
        stream = raw.telemetry(raw.producing("orders"))
        assert answer(http, "/healthz") == (200, "alive\n")
        metrics = answer(http, "/metrics")[1]
        assert "outbox_worker_ready 1.0" in metrics
        assert 'outbox_rocketmq_call_seconds_count{call="SendMessage",status="OK"} 1.0' in metrics
        wait_until(lambda: raw.id in run_cli("rocketmq", "clients", *url).out, "its client is told")
        (client,) = json.loads(run_cli("rocketmq", "clients", *url, "-o", "json").out)["items"]
        assert (client["name"], client["type"], client["topic"]) == (raw.id, "PRODUCER", "orders")
        assert client["servers"] == [each.name for each in Outbox(engine).operator.workers()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert stream.get() is None
        assert stream.failure is None
    assert json.loads(run_cli("rocketmq", "clients", *url, "-o", "json").out)["items"] == []
    assert Outbox(engine).operator.workers() == []


def test_several_processes_share_a_port(engine: Engine) -> None:
    """One is killed: the other goes on, takes its handles, and another one is started."""
    with served(engine, "--processes", "2") as (process, port, http), RawClient(f"127.0.0.1:{port}") as raw:
        wait_until(lambda: answer(http + 1, "/readyz")[0] == 200, "the second one is ready")
        for number in range(6):
            assert code(raw.send(message("orders", b"%d" % number))) == 20000
        dispatch_all(engine)
        _, got = raw.receive("orders", "mail")
        assert len(got) == 6
        first, *_ = [int(each.name.rpartition(":")[2]) for each in Outbox(engine).operator.workers()]
        os.kill(first, signal.SIGKILL)
        apart = [("grpc.use_local_subchannel_pool", 1)]

        def acknowledged(handle: str) -> bool:
            # A connection to the one that was killed fails; the next one is to the other.
            try:
                with RawClient(f"127.0.0.1:{port}", options=apart) as other:
                    return code(other.ack("orders", "mail", handle)) == 20000
            except grpc.RpcError:
                return False

        for handle in map(handle_of, got):
            wait_until(partial(acknowledged, handle), "it is acknowledged")
        wait_until(lambda: answer(http, "/readyz")[0] == 200, "another one has started")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_killed_server_loses_nothing(engine: Engine) -> None:
    """What was answered is there, what was leased can be settled at the next server."""
    with served(engine) as (process, port, _), RawClient(f"127.0.0.1:{port}") as raw:
        for _ in range(5):
            assert code(raw.send(message("orders"))) == 20000
        dispatch_all(engine)
        _, got = raw.receive("orders", "mail")
        begun = raw.send(message("orders", message_type="TRANSACTION"))["entries"][0]["transaction_id"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    with served(engine) as (_, port, _), RawClient(f"127.0.0.1:{port}") as raw:
        assert len(got) == 5
        assert code(raw.ack("orders", "mail", *map(handle_of, got))) == 20000
        assert code(raw.end("orders", begun, "COMMIT")) == 20000


def test_wrong_usage() -> None:
    """It says what is missing."""
    for arguments, words in (
        (["--tls-port", "8082"], "--tls-port needs a certificate: give --cert FILE and --key FILE"),
        (["--processes", "2", "--port", "0"], "several processes can't share a free port"),
        (["--config", "/does/not/exist.toml"], "can't be read as TOML"),
    ):
        result = run_cli("rocketmq", "serve", "--url", "postgresql://x@127.0.0.1:1/x", *arguments)
        assert result.code != 0
        assert words in result.err


# --- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of localhost that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    new = [program("openssl", package="openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*new, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key,
                    "-out", cert], check=True, capture_output=True)  # fmt: skip
    return cert, key


def test_tls_beside_plain_text(engine: Engine, new_server: NewServer, certificate: tuple[Path, Path]) -> None:
    """Two ports; a route keeps each client at its own."""
    cert, key = certificate
    listen = [Listen(port=0), Listen(port=0, cert=str(cert), key=str(key))]
    server = RocketmqServer(Outbox(engine, settings=Settings()), RocketmqOptions(auto_create=True), listen)
    server.start()
    try:
        plain, tls = server.ports
        trusts = grpc.ssl_channel_credentials(cert.read_bytes())
        with RawClient(f"127.0.0.1:{plain}") as raw, RawClient(f"localhost:{tls}", credentials=trusts) as secure:
            for client, port in ((raw, plain), (secure, tls)):
                route = client.call("QueryRoute", {"topic": {"name": "orders"}, "endpoints": client.endpoints()})
                assert route["message_queues"][0]["broker"]["endpoints"]["addresses"][0]["port"] == port
                assert code(client.send(message("orders"))) == 20000
    finally:
        server.stop()


def test_certificates_that_can_not_be_read(engine: Engine, tmp_path: Path) -> None:
    """The error names the file, or the one that is missing; so does that of a port that is taken."""

    def start(**listen: object) -> None:
        RocketmqServer(Outbox(engine, settings=Settings()), RocketmqOptions(), [Listen(port=0, **listen)]).start()  # type: ignore[arg-type]

    missing = str(tmp_path / "none.pem")
    with pytest.raises(InvalidSettings, match=r"none\.pem can't be read"):
        start(cert=missing, key=missing)
    with pytest.raises(InvalidSettings, match="TLS needs a certificate and its key"):
        start(cert=missing)
    with pytest.raises(InvalidSettings, match=r"can't listen at 203\.0\.113\.1"):
        start(host="203.0.113.1")


# --- rights in PostgreSQL ------------------------------------------------------------------------------------------


@pytest.fixture
def granted(engine: Engine) -> Iterator[Engine]:
    """An engine of a role that has the rights of a producer, a worker and a consumer, and no others."""
    owner = engine.execution_options(isolation_level="AUTOCOMMIT")
    with owner.connect() as connection:
        connection.exec_driver_sql("CREATE ROLE rocketmq_server LOGIN PASSWORD 'x'")
        for role in ("producer", "worker", "consumer"):
            connection.exec_driver_sql(run_cli("db", "grants", "--role", role, "--to", "rocketmq_server").out)
    other = create_engine(engine.url.set(username="rocketmq_server", password="x"))  # noqa: S106 - of this test
    yield other
    other.dispose()
    with owner.connect() as connection:
        connection.exec_driver_sql("DROP OWNED BY rocketmq_server")
        connection.exec_driver_sql("DROP ROLE rocketmq_server")


def test_the_rights_of_three_roles_are_enough(engine: Engine, granted: Engine, new_server: NewServer) -> None:
    """All calls work with what `outbox db grants` prints for them."""
    server = new_server(outbox=Outbox(granted, settings=Settings(immunity=0, check_interval=0.3)))
    with RawClient(server.addresses[0]) as raw:
        stream = raw.telemetry(raw.producing("paid"))
        begun = raw.send(message("paid", message_type="TRANSACTION"))["entries"][0]["transaction_id"]
        assert stream.get() is not None
        assert code(raw.end("paid", begun, "COMMIT")) == 20000
        later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
        handle = raw.send(message("orders", delivery_timestamp=later))["entries"][0]["recall_handle"]
        assert code(raw.call("RecallMessage", {"topic": {"name": "orders"}, "recall_handle": handle})) == 20000
        for _ in range(3):
            assert code(raw.send(message("orders"))) == 20000
        dispatch_all(engine)
        _, (first, second, third) = raw.receive("orders", "mail")
        assert code(raw.ack("orders", "mail", handle_of(first))) == 20000
        assert code(raw.change("orders", "mail", handle_of(second), "20s")) == 20000
        dead = {"group": {"name": "mail"}, "topic": {"name": "orders"}, "receipt_handle": handle_of(third)}
        assert code(raw.call("ForwardMessageToDeadLetterQueue", dead)) == 20000
        assert code(raw.call("NotifyClientTermination", {"group": {"name": "mail"}})) == 20000
        raw.telemetry(raw.consuming("mail", "orders", kind="PUSH_CONSUMER"))
        again = raw.receive("orders", "mail", auto_renew=True, invisible_duration=None)[1]
        server._in_loop(server._receiving.renewals.once())
        assert all(code(raw.ack("orders", "mail", handle_of(each))) == 20000 for each in again)
