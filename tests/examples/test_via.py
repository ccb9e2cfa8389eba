"""The bank transfer with a broker, or webhooks, between the banks: all is killed, and what is answered gets lost."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from uuid import UUID, uuid4

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, text
from standardwebhooks import Webhook

from examples.bank_transfer import brokers
from examples.bank_transfer import demo as demo_module
from examples.bank_transfer.banks import Banks
from examples.bank_transfer.demo import DemoOptions, run
from examples.bank_transfer.endpoint import endpoint
from examples.bank_transfer.exchange import Exchange, opened
from examples.bank_transfer.message import TOPIC, TransferOrdered
from examples.bank_transfer.options import Via
from examples.bank_transfer.proxy import Proxy
from examples.bank_transfer.source import Source, survey
from examples.bank_transfer.workday import Plan
from outbox import Outbox
from tests.examples.conftest import Demo, Ran
from tests.kit import sample, tries
from tests.kit.programs import lacks

#: More kills than there are kinds of processes: each kind has its turn before another one has its second.
ORDERS, KILLS = tries(80), tries(8)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - of the tests
TRANSFER = TransferOrdered.model_validate({"transfer_id": 7, "sender": 1, "receiver": "AB-71000001", "amount": "30.00"})


def ran(demo: Demo, kind: Via, *hooks: Callable[[Banks], None], **options: object) -> Ran:
    """Return what became of a run, unless this machine lacks what it needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_module, "opened", _or_lacking)
        return demo(*hooks, via=kind, **options)


@contextmanager
def _or_lacking(kind: Via, seed: int, *, disturbed: bool) -> Iterator[Exchange]:
    with ExitStack() as stack:
        try:
            exchange = stack.enter_context(opened(kind, seed, disturbed=disturbed))
        except brokers.Missing as error:
            lacks(error.program, error.mend)
        yield exchange


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(Via))
def test_no_money_is_lost_or_made(demo: Demo, kind: Via) -> None:
    """Whatever is killed, whatever answer is lost: each transfer is booked once, to the cent, in order; or refunded."""
    code, report, out, err = ran(demo, kind, transfers=ORDERS, kills=KILLS, seed=3)
    assert (code, report["faults"]) == (0, [])
    states, via = report["states"], report["via"]
    assert (states["debited"], report["parked"], report["in_flight"]) == (0, [], 0)
    assert states["credited"] + states["refunded"] == report["transfers"] == ORDERS - states["refused"]
    assert states["refunded"] == len(report["refunded"])
    assert states["refunded"] + states["refused"] > 0
    assert report["money"]["before"]["total"] == report["money"]["after"]["total"]
    assert sum(report["kills"].values()) == KILLS
    assert (report["kills"].get("broker", 0) > 0) == kind.has_broker
    assert report["reconciliation"]["found"] == {}
    # Bank B answers each transfer; the other bank gets each message at least once.
    assert via["messages"] == 2 * report["transfers"] <= via["published"]
    assert via["messages"] <= via["taken"]
    assert via["cuts"] + via["dropped_answers"] > 0
    assert " dropped " in out
    assert "Between them is " in err


@pytest.mark.slow
@pytest.mark.parametrize("mode", sample(["two_phase", "tcc"], 1))
def test_half_messages_are_relayed_once_they_are_decided(demo: Demo, mode: str) -> None:
    """What a teller that died has left undecided reaches no broker unless it is committed."""
    code, report, *_ = ran(demo, Via.REDIS, transfers=ORDERS, kills=KILLS, seed=2, **{mode: True})
    assert (code, report["faults"]) == (0, [])
    assert report["halves"]["undecided"] == 0
    assert report["via"]["messages"] == 2 * report["transfers"]


@pytest.mark.slow
def test_what_differs_between_the_banks_is_found(demo: Demo) -> None:
    """The audit can fail: a message that is gone, one with another body, and credits in another order."""

    def harm(banks: Banks) -> None:
        with banks.b.begin() as b:
            ((account, first, last),) = b.execute(
                text("SELECT account_id, min(id), max(id) FROM ledger_entry GROUP BY 1 HAVING count(*) > 1 LIMIT 1")
            )
            harmed.append(account)
            for each, to in ((first, -1), (last, first), (-1, last)):
                b.execute(text("UPDATE ledger_entry SET id = :to WHERE id = :each"), {"each": each, "to": to})
            ids = list(
                b.scalars(text("SELECT id FROM outbox.half_message WHERE topic = 'transfer' ORDER BY id LIMIT 2"))
            )
            b.execute(text("DELETE FROM outbox.message WHERE half_id = :id"), {"id": ids[0]})
            b.execute(text("UPDATE outbox.half_message SET body = '{}' WHERE id = :id"), {"id": ids[1]})

    harmed: list[str] = []
    code, report, *_ = ran(demo, Via.NATS, harm, transfers=tries(100), reconcile=False)
    assert code == 1
    told = [fault.partition(":")[0] for fault in report["faults"]]
    assert "1 message of bank A never taken in at bank B" in told
    assert "1 message of bank A with another body at bank B" in told
    assert f"account {harmed[0]} of bank B was credited in another order than its transfers were sent in" in told


def test_neither_bank_is_told_where_the_others_database_is() -> None:
    """Their processes can't but go by what is between them."""
    source = Source(None, 10, 1)
    banks = Banks.at("postgresql+psycopg://one/a", "postgresql+psycopg://two/b")
    with opened(Via.WEBHOOK, 1, disturbed=False) as exchange:
        assert isinstance(exchange, Exchange)
        plan = Plan(DemoOptions(via=Via.WEBHOOK), source, survey(source, 1), exchange=exchange)
        at_a, at_b = plan.environments(banks)
    assert (at_a["BANK_A_URL"], at_b["BANK_B_URL"]) == ("postgresql+psycopg://one/a", "postgresql+psycopg://two/b")
    assert "two" not in json.dumps(at_a)
    assert "one" not in json.dumps({name: value for name, value in at_b.items() if name != "BANK_VIA"})
    assert at_a["BANK_VIA"] == at_b["BANK_VIA"]


def test_a_program_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and how to get it."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert run(DemoOptions(via=Via.KAFKA)) == 2
    assert "java isn't there: apt-get install openjdk" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [{"via": "pigeon"}, {"via": "nats", "faults": True}, {"via": "nats", "console": True}]
)
def test_options_that_cannot_be(options: dict[str, object]) -> None:
    """What needs a bank that knows the other one's database says so."""
    with pytest.raises(ValueError, match="via"):
        DemoOptions(**options)  # type: ignore[arg-type]  # what the test says


# --- the endpoint ---------------------------------------------------------------------------------------------------


@pytest.fixture
def client(engine: Engine) -> Iterator[TestClient]:
    """A client of bank B's endpoint."""
    with TestClient(endpoint(Outbox(engine), engine, TOPIC, TransferOrdered, SECRET)) as client:
        yield client


def post(client: TestClient, id_: UUID, body: str, *, at: float, secret: str = SECRET) -> int:
    """Post a body, signed by the library of those who wrote the specification; return the status."""
    signature = Webhook(secret).sign(str(id_), dt.datetime.fromtimestamp(at, dt.UTC), body)
    headers = {"webhook-id": str(id_), "webhook-timestamp": str(int(at)), "webhook-signature": signature}
    headers |= {"ce-partitionkey": "AB%25-7", "content-type": "application/json"}
    return client.post("/", content=body, headers=headers).status_code


def test_what_is_posted_again_is_stored_once(engine: Engine, client: TestClient) -> None:
    """Under the id and the key that it has at the other bank; any call is answered as if it was the first."""
    id_, body = uuid4(), TRANSFER.model_dump_json()
    assert [post(client, id_, body, at=time.time()) for _ in range(3)] == [204] * 3
    with engine.connect() as connection:
        ((stored, key, topic, written),) = connection.execute(
            text("SELECT id, key, topic, convert_from(body, 'UTF8') FROM outbox.half_message")
        )
    assert (stored, key, topic, written) == (id_, "AB%-7", TOPIC, body)


def test_what_is_not_signed_or_is_old_or_no_transfer_is_refused(engine: Engine, client: TestClient) -> None:
    """Another secret, a signature of last week, a body that isn't one: nothing of them is stored."""
    id_, body, now = uuid4(), TRANSFER.model_dump_json(), time.time()
    other = "whsec_" + "A" * 32
    assert post(client, id_, body, at=now, secret=other) == 401
    assert post(client, id_, body, at=now - 3600) == 401
    assert post(client, id_, '{"transfer_id": "x"}', at=now) == 422
    assert client.post("/", content=body).status_code == 422
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outbox.half_message")).scalar_one() == 0


# --- the proxy ------------------------------------------------------------------------------------------------------


@contextmanager
def echo() -> Iterator[tuple[int, list[bytes]]]:
    """Run a server that answers what it is told; yield its port, and the list of what it was told."""
    told: list[bytes] = []

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    while piece := connection.recv(100):
                        told.append(piece)
                        connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        yield int(listening.getsockname()[1]), told
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_the_proxy_loses_answers_and_never_what_was_said() -> None:
    """Each connection goes well for a while; its end costs the answer to what was said last, which has arrived."""
    with echo() as (port, told), Proxy(1) as proxy:
        proxy.to = port
        unanswered = set[bytes]()
        for number in range(100):
            with socket.create_connection(("127.0.0.1", proxy.port)) as client, suppress(ConnectionError):
                for step in range(3):
                    said = b"%d-%d" % (number, step)
                    client.sendall(said)
                    if client.recv(100) != said:
                        unanswered.add(said)
                        break
    assert proxy.dropped >= 2
    assert proxy.dropped + proxy.cuts >= len(unanswered) >= proxy.dropped
    assert unanswered <= set(told)
