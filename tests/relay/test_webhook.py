"""Webhooks: signatures, answers, and addresses that nothing may be sent to."""

from __future__ import annotations

import base64
import email.utils
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook as Referee
from standardwebhooks.webhooks import WebhookVerificationError

from outbox.consumer.control.gate import Gate
from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.errors import InvalidHandler
from outbox.relay.webhook import LONGEST_RETRY_AFTER, Webhook, is_global
from tests.consumer.test_control import Clock, control, trial_due
from tests.consumer.test_unavailable import seconds_to_trial
from tests.kit.bench import Bench
from tests.relay.servers import Endpoint, http_endpoint
from tests.relay.targets import SECRET

Relaying = Callable[..., OutsideConsumer]
NEW = "whsec_" + base64.b64encode(b"n" * 32).decode()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """An endpoint of the test's own."""
    with http_endpoint() as endpoint:
        yield endpoint


def hook(endpoint: Endpoint, **options: Any) -> Webhook:
    """Return what publishes to the endpoint."""
    return Webhook(endpoint.url, **{"secrets": [SECRET], "private": True, **options})


def always(status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> Any:
    """Return what answers every call so."""
    return lambda *_: (status, headers or {}, body)


@pytest.mark.parametrize("body", [{"a": 1}, b"\xff\x00\xfe", "grüße", b""])
def test_the_official_library_takes_the_signature(
    bench: Bench, relaying: Relaying, endpoint: Endpoint, body: Any
) -> None:
    """With the old secret and with the new one, while they are exchanged; with no other."""
    (message_id,) = bench.send(body)
    assert bench.consume(relaying(hook(endpoint, secrets=[NEW, SECRET]))).done == 1
    ((headers, taken),) = endpoint.took
    assert headers["webhook-id"] == str(message_id)
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
    for secret in (NEW, SECRET):
        verify(secret, taken, headers)
    with pytest.raises(WebhookVerificationError):
        verify("whsec_" + base64.b64encode(b"x" * 32).decode(), taken, headers)
    if taken:
        with pytest.raises(WebhookVerificationError):
            verify(SECRET, taken + b" ", headers)


def verify(secret: str, body: bytes, headers: dict[str, str]) -> None:
    """Have the official library verify a call; it reads bodies as text, so that it gets what isn't by their digest."""
    referee = Referee(secret)
    try:
        text = body.decode()
    except UnicodeDecodeError:
        import hashlib
        import hmac

        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(secret.removeprefix("whsec_"))
        expected = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
        if expected not in headers["webhook-signature"].split(" "):
            raise WebhookVerificationError from None
        return
    try:
        referee.verify(text, headers)
    except ValueError as error:  # it reads the body as JSON, after it has verified it
        assert "Expecting value" in str(error)


def test_410_pauses_the_group(bench: Bench, relaying: Relaying, endpoint: Endpoint) -> None:
    """Until an operator resumes it; no attempt is used up, and the audit tells whose act it was."""
    endpoint.answer = always(410, body=b"we have moved on")
    consumer = relaying(hook(endpoint))
    bench.send(1)
    bench.consume(consumer)
    held = control(bench)
    assert (held.state, held.paused_by) == ("paused", "handler")
    assert "410: we have moved on" in held.because
    assert bench.statuses() == []
    ((actor, action, target),) = bench.rows("SELECT actor, action, target FROM outbox.audit")
    assert (actor, action, target) == ("handler", "pause_group", "g")
    endpoint.answer = always(200)
    assert "resumed" in bench.app.operator.resume_group("g", by="me")
    assert bench.consume(relaying(hook(endpoint))).done == 1


@pytest.mark.parametrize("status", [300, 302, 307, 401, 403, 404, 408, 425, 429, 500, 502, 503, 504])
def test_what_says_nothing_of_the_message(bench: Bench, relaying: Relaying, endpoint: Endpoint, status: int) -> None:
    """No attempt is used up, and no redirect is followed."""
    endpoint.answer = always(status, {"location": endpoint.url})
    bench.send(1)
    bench.consume(relaying(hook(endpoint)))
    assert bench.statuses() == []
    assert str(status) in control(bench).because
    assert len(endpoint.took) == 1


@pytest.mark.parametrize("status", [400, 409, 411, 413, 415, 422, 451])
def test_what_is_about_the_message(bench: Bench, relaying: Relaying, endpoint: Endpoint, status: int) -> None:
    """It is parked with the beginning of the answer, and what comes behind it goes on."""
    endpoint.answer = lambda headers, body: (status, {}, b"field x" * 100) if body == b"1" else (200, {}, b"")
    ids = bench.send(1, 2)
    bench.consume(relaying(hook(endpoint)))
    assert [bench.inbox()[each].status for each in ids] == ["parked", "consumed"]
    error = str(bench.inbox()[ids[0]].error)
    assert f"{status}: field x" in error
    assert len(error) < 400


def test_a_trial_that_is_refused_closes_the_breaker(bench: Bench, relaying: Relaying, endpoint: Endpoint) -> None:
    """The endpoint is there again, and says no to this message: the others needn't wait."""
    clock = Clock()
    endpoint.answer = always(503)
    consumer = relaying(hook(endpoint))
    consumer.gate = Gate(consumer.subscription, bench.settings, consumer._queues.keys(), clock)
    bench.send(1, 2, 3, key="k")
    bench.consume(consumer)
    endpoint.answer = lambda headers, body: (422, {}, b"") if body == b"1" else (204, {}, b"")
    trial_due(bench, clock)
    bench.consume(consumer)
    clock.look()
    bench.consume(consumer)
    assert bench.statuses() == [("parked", 1), ("consumed", 1), ("consumed", 1)]
    assert control(bench).state == "running"


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("120", 100, 120),
        ("999999", LONGEST_RETRY_AFTER - 20, LONGEST_RETRY_AFTER),
        ("-5", 0, 1),
        ("nan", 0, 1),
        ("soon", 0, 1),
        ("date", 80, 101),
    ],
)
def test_retry_after(
    bench: Bench, relaying: Relaying, endpoint: Endpoint, header: str, least: float, most: float
) -> None:
    """In seconds or as a date, and no longer than an hour."""
    text = email.utils.formatdate(time.time() + 100, usegmt=True) if header == "date" else header
    endpoint.answer = always(429, {"retry-after": text})
    bench.send(1)
    bench.consume(relaying(hook(endpoint)))
    assert least < seconds_to_trial(bench) <= most


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",  # noqa: S104 - nothing is bound to it
        "255.255.255.255", "198.18.0.1", "192.0.2.1", "240.0.0.1", "::", "::1", "fe80::1", "fc00::1", "ff02::1",
        "::ffff:10.0.0.1", "::ffff:127.0.0.1", "2002:0a00:0001::", "64:ff9b::10.0.0.1", "64:ff9b::7f00:1",
        "64:ff9b:1::1", "2001:db8::1", "2001:0:0a00:1::1", "2a01::5efe:169.254.169.254", "192.88.99.1", "3fff::1",
        "168.63.129.16",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_internet(
    bench: Bench, relaying: Relaying, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Whatever name leads there, also as one of several: nothing is connected to, and no message pays."""
    assert not is_global(ipaddress.ip_address(address))
    resolve = socket.getaddrinfo
    asked: list[str] = []

    def resolved(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != "hooks.example":
            return resolve(host, *arguments, **options)
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 443)) for each in ("93.184.215.14", address)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    consumer = relaying(Webhook("https://hooks.example/x", secrets=[SECRET]))
    bench.send(1)
    bench.consume(consumer)
    assert asked == ["hooks.example"]
    assert bench.statuses() == []
    assert "isn't an address of the public internet" in control(bench).because


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet(address: str) -> None:
    """These are."""
    assert is_global(ipaddress.ip_address(address))


def test_a_proxy_of_the_environment_counts_for_nothing(
    bench: Bench, relaying: Relaying, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would resolve the name by itself."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    bench.send(1)
    assert bench.consume(relaying(hook(endpoint))).done == 1


def test_what_is_sent_beside_it(bench: Bench, relaying: Relaying, endpoint: Endpoint) -> None:
    """The name of the host as it was given, and headers of the declaration's own."""
    url = endpoint.url.replace("127.0.0.1", "localhost")
    bench.send(1)
    consumer = relaying(Webhook(url, secrets=[SECRET], private=True, headers={"authorization": "Bearer x"}))
    assert bench.consume(consumer).done == 1
    ((headers, _),) = endpoint.took
    assert headers["host"].startswith("localhost:")
    assert headers["authorization"] == "Bearer x"


@pytest.mark.parametrize(
    "name",
    ["content-length", "Host", "Transfer-Encoding", "connection", "expect", "Webhook-Signature", "Authorization"],
)
def test_a_header_that_would_speak_for_the_call(
    bench: Bench, relaying: Relaying, endpoint: Endpoint, name: str
) -> None:
    """It is left out: the call is whole, and signed by nothing but the secrets."""
    bench.send({"a": 1}, headers={name: "chunked"})
    consumer = relaying(hook(endpoint, headers={"authorization": "Bearer x"}))
    assert bench.consume(consumer).done == 1
    ((headers, body),) = endpoint.took
    assert body == b'{"a":1}'
    assert "chunked" not in headers.values()
    assert headers["authorization"] == "Bearer x"


def test_a_header_that_http_cannot_have(bench: Bench, relaying: Relaying, endpoint: Endpoint) -> None:
    """Its message is parked; a value with a line break is encoded, and makes no header of its own."""
    ids = bench.send(1, headers={"my header": "x"}) + bench.send(2, headers={"note": "a\r\nevil: b"})
    bench.consume(relaying(hook(endpoint)))
    assert [bench.inbox()[each].status for each in ids] == ["parked", "consumed"]
    ((headers, _),) = endpoint.took
    assert headers["note"] == "a%0D%0Aevil: b"
    assert "evil" not in headers


@pytest.mark.parametrize(
    ("url", "secrets", "why"),
    [
        ("http://a.example/x", [SECRET], "https"),
        ("ftp://a.example/x", [SECRET], "https"),
        ("https://u:p@a.example/x", [SECRET], "password"),
        ("https://a.example/x", [], "at least one"),
        ("https://a.example/x", SECRET, "a list"),
        ("https://a.example/x", ["whsec_not base64"], "base64"),
        ("https://a.example/x", [b"short"], "24 to 64"),
    ],
)
def test_declarations_that_cannot_be(url: str, secrets: Any, why: str) -> None:
    """They are refused where they are made, and no secret is in the text."""
    with pytest.raises(InvalidHandler, match=why) as refused:
        Webhook(url, secrets=secrets)
    assert "whsec" not in str(refused.value) or "must be whsec_" in str(refused.value)
    assert ":p@" not in str(refused.value)
