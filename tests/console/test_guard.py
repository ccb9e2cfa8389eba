"""The guard: which hosts and origins may ask for what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from fastapi import FastAPI
from starlette.datastructures import Headers

from outbox.console.context import Trust
from outbox.errors import InvalidSettings
from tests.console.web import API, Asker, Http, Shop, console_of

QUERY = f"{API}/messages/query"


@pytest.fixture(scope="module")
def guarded(museum: Shop, ask: Asker) -> Callable[..., Http]:
    """A function that makes an asker of a console with these settings."""

    apps: dict[str, FastAPI] = {}

    def make(base_url: str = "http://console.test", client: str = "127.0.0.1", **options: object) -> Http:
        chosen = {"allowed_hosts": ["console.test"], **options}
        if (key := str(chosen)) not in apps:
            apps[key] = console_of(museum.outbox, **chosen)
        return ask(apps[key], "viewer", base_url=base_url, client=client)

    return make


CROSS_ORIGIN = {
    "another site": {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.test"},
    "a sibling of our domain": {"Sec-Fetch-Site": "same-site", "Origin": "https://other.console.test"},
    "another site over plain http, where browsers send no Sec-Fetch-Site": {"Origin": "http://evil.test"},
    "a sandboxed frame": {"Origin": "null"},
    "another port of our host": {"Origin": "http://console.test:8080"},
}


@pytest.mark.parametrize("headers", CROSS_ORIGIN.values(), ids=CROSS_ORIGIN.keys())
def test_other_sites_can_not_send(guarded: Callable[..., Http], headers: dict[str, str]) -> None:
    """Each of the five cross-origin cases is refused, and told which header and which setting it was."""
    answer = guarded().ask("POST", QUERY, json={}, headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:outbox:problem:cross-origin")
    header = "Sec-Fetch-Site" if "Sec-Fetch-Site" in headers else "Origin"
    assert header in answer.json()["detail"]
    assert header == "Sec-Fetch-Site" or "OUTBOX_CONSOLE_TRUSTED_ORIGINS" in answer.json()["detail"]


SAME_ORIGIN = {
    "our own page over TLS": {"Sec-Fetch-Site": "same-origin", "Origin": "https://console.test"},
    "typed by the user": {"Sec-Fetch-Site": "none"},
    "our own page over plain http": {"Origin": "http://console.test"},
    "our own page before a proxy that ends TLS": {"Origin": "https://console.test"},
    "no browser": {},
}


@pytest.mark.parametrize("headers", SAME_ORIGIN.values(), ids=SAME_ORIGIN.keys())
def test_our_own_pages_and_programs_can_send(guarded: Callable[..., Http], headers: dict[str, str]) -> None:
    """What comes from our own origin or no browser at all is let through."""
    assert guarded().ask("POST", QUERY, json={}, headers=headers).status_code == 200


def test_a_trusted_origin_can_send(guarded: Callable[..., Http]) -> None:
    """An origin that is named in the settings may send, whatever else is said; one that looks like it may not."""
    http = guarded(trusted_origins=["https://ops.test"])
    for site in ({}, {"Sec-Fetch-Site": "cross-site"}):
        assert http.ask("POST", QUERY, json={}, headers={"Origin": "https://ops.test", **site}).status_code == 200
    assert http.ask("POST", QUERY, json={}, headers={"Origin": "https://ops.test.evil.test"}).status_code == 403


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_rebound_name_is_refused(guarded: Callable[..., Http], method: str) -> None:
    """A page of an attacker whose name was bound to our address is same-origin for the browser, but not for us."""
    http = guarded("http://evil.test")
    headers = {"Origin": "http://evil.test", "Sec-Fetch-Site": "same-origin"}
    answer = http.ask(method, QUERY if method == "POST" else f"{API}/meta", headers=headers, json={})
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:outbox:problem:host-not-allowed")
    assert "'evil.test'" in answer.json()["detail"]
    assert "OUTBOX_CONSOLE_ALLOWED_HOSTS" in answer.json()["detail"]


def test_without_allowed_hosts_only_this_machine_is_asked_for(guarded: Callable[..., Http]) -> None:
    """By default the console answers to the names of the loopback only, at any port."""
    for base, status in {"http://localhost:8900": 200, "http://127.0.0.1": 200, "http://[::1]:1": 200,
                         "http://console.test": 403, "http://localhost.evil.test": 403}.items():  # fmt: skip
        assert guarded(base, allowed_hosts=None).ask("GET", f"{API}/meta").status_code == status, base


def test_allowed_hosts_may_have_a_star() -> None:
    """A star stands for sub-domains, or for all hosts."""
    trust = Trust(["*.console.test", "exact.test"])
    assert [trust.allows_host(host) for host in ("a.console.test:1", "exact.test", "EXACT.test")] == [True] * 3
    assert not any(map(trust.allows_host, ("console.test", "evilconsole.test", "a.exact.test", "", "a b", "a/b")))
    assert Trust(["*"]).allows_host("anything")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_the_api_takes_json_only(guarded: Callable[..., Http], content_type: str) -> None:
    """What a form of another site could send is refused, whatever is in it."""
    answer = guarded().ask("POST", QUERY, content=b"{}", headers={"Content-Type": content_type})
    assert (answer.status_code, answer.json()["type"]) == (415, "urn:outbox:problem:unsupported-media-type")


def test_a_body_may_not_be_too_big(guarded: Callable[..., Http]) -> None:
    """More than 64 KiB are refused, whether the length was announced or not."""
    big = b'{"key": "' + b"x" * 70_000 + b'"}'

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(big), 10_000):
            yield big[start : start + 10_000]

    for content in (big, parts()):
        answer = guarded().ask("POST", QUERY, content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:outbox:problem:too-large")


def test_what_proxies_say_is_believed_of_trusted_ones_only(guarded: Callable[..., Http]) -> None:
    """X-Forwarded-Host counts from a trusted proxy, and from nobody else."""
    said = {"X-Forwarded-Host": "console.test", "X-Forwarded-For": "203.0.113.9"}
    trusting = {"base_url": "http://10.0.0.7:8900", "trusted_proxies": ["10.0.0.0/8"]}
    assert guarded(client="10.1.2.3", **trusting).ask("GET", f"{API}/meta", headers=said).status_code == 200
    said["X-Forwarded-Host"] = "console.test, evil.test"
    assert guarded(client="10.1.2.3", **trusting).ask("GET", f"{API}/meta", headers=said).status_code == 403
    said["X-Forwarded-Host"] = "console.test"
    assert guarded(client="192.0.2.1", **trusting).ask("GET", f"{API}/meta", headers=said).status_code == 403


@pytest.mark.parametrize(
    ("said", "client"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("198.51.100.1, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("203.0.113.9:4711", "203.0.113.9"),
        ("[2001:db8::1]:4711", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("nonsense", "unknown"),
        ("", "10.0.0.1"),
    ],
)
def test_the_caller_behind_proxies(said: str, client: str) -> None:
    """The last address that isn't a trusted proxy's is the caller's, for the audit and the throttle."""
    scope = {"client": ("10.0.0.1", 5000)}
    assert Trust(proxies=["10.0.0.0/8"]).client(scope, Headers({"X-Forwarded-For": said})) == client
    assert Trust().client(scope, Headers({"X-Forwarded-For": said})) == "10.0.0.1"


def test_a_method_that_is_not_there_is_a_problem(guarded: Callable[..., Http]) -> None:
    """405 says which methods there are, with all the headers of the console."""
    answer = guarded().ask("DELETE", f"{API}/meta")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert answer.json()["type"] == "urn:outbox:problem:method-not-allowed"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("options", [{"origins": ["ops.test"]}, {"proxies": ["10.0.0.1/8"]}, {"proxies": ["proxy"]}])
def test_settings_that_can_not_be_are_refused(options: dict[str, list[str]]) -> None:
    """An origin without scheme and a proxy that is no network are told at the start."""
    with pytest.raises(InvalidSettings):
        Trust(**options)
