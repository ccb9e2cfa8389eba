"""Who is let in: tokens, sessions, passwords, headers of proxies, and what the application brings."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from fastapi import Depends, Header, HTTPException

from outbox.console import (
    AllowAll,
    AnyOf,
    Basic,
    Bearer,
    Principal,
    Role,
    TrustedHeader,
    auth,
    hash_password,
    hash_token,
)
from outbox.console.auth import PasswordHash, Throttle
from outbox.console.context import CANCEL, PERMISSIONS, ROLES, VIEW, Authorizer
from outbox.console.problems import Problem
from outbox.errors import InvalidSettings
from tests.console.web import API, Asker, Http, Shop, authorizer, bearer, console_of, token_of

META = f"{API}/meta"
#: Cheap, for many of them.
HASH = hash_password("open sesame", cost=4)


@pytest.fixture
def door(museum: Shop, ask: Asker) -> Callable[..., Http]:
    """A function that makes an asker of a console with this authorizer, as nobody."""

    def make(authorizer: Authorizer, client: str = "127.0.0.1", **options: Any) -> Http:
        return ask(console_of(museum.outbox, authorizer=authorizer, **options), client=client)

    return make


def basic(name: str, password: str) -> dict[str, str]:
    """The header by which a browser sends a name and a password."""
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def test_nobody_is_let_in_without_credentials(door: Callable[..., Http]) -> None:
    """Without a token, with a wrong one, or with another scheme: 401, and how to log in."""
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, basic("vera", "x")):
        answer = door(authorizer()).ask("GET", META, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["type"] == "urn:outbox:problem:unauthenticated"


def test_a_token_has_a_role(door: Callable[..., Http]) -> None:
    """Each token is somebody with the permissions of a role, each role with those of the one before."""
    for role, name in {"viewer": "vera", "operator": "otto", "admin": "ada"}.items():
        meta = door(authorizer()).as_role(role).get("/meta").json()
        assert (meta["principal"], meta["role"]) == (name, role)
        assert meta["permissions"] == sorted(ROLES[Role(role)])
    assert ROLES[Role.VIEWER] < ROLES[Role.OPERATOR] < ROLES[Role.ADMIN] == PERMISSIONS


def test_passwords_are_checked(door: Callable[..., Http]) -> None:
    """Basic: the right password lets in (again and again), anything else doesn't."""
    http = door(Basic({"otto": (HASH, "operator")}))
    for _ in range(2):
        assert http.ask("GET", META, headers=basic("otto", "open sesame")).json()["role"] == "operator"
    for headers in (basic("otto", "wrong"), basic("nobody", "open sesame"), {"Authorization": "Basic !"}, {}):
        answer = http.ask("GET", META, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"].partition(" ")[0]) == (401, "Basic")


def test_hashes_of_passwords() -> None:
    """A hash is salted, keeps no password, and only one that was made here is taken."""
    assert hash_password("x", cost=4) != hash_password("x", cost=4)
    assert PasswordHash.read(HASH).matches("open sesame")
    assert not PasswordHash.read(HASH).matches("open sesame ")
    for wrong in ("open sesame", "scrypt$31$8$5$YQ$YQ", HASH[:-4], HASH.replace("$8$", "$99$")):
        with pytest.raises(InvalidSettings, match="hash-password"):
            Basic({"otto": (wrong, "viewer")})


def test_tokens_are_given_by_their_hash() -> None:
    """Who writes a token itself into the configuration is told, without the token."""
    with pytest.raises(InvalidSettings, match="SHA-256") as told:
        Bearer({"my secret token": Principal.of("ci")})
    assert "my secret" not in str(told.value)
    with pytest.raises(InvalidSettings, match="role 'root' must be one of: viewer, operator, admin"):
        Principal.of("ci", "root")


def test_guessing_is_slowed_down(door: Callable[..., Http]) -> None:
    """After five wrong passwords of a name from an address it has to wait, even with the right one; others don't."""
    basics = Basic({"otto": (HASH, "operator"), "vera": (HASH, "viewer")}, throttle=Throttle(clock=lambda: 0.0))
    near, far = door(basics), door(basics, client="192.0.2.7")
    for _ in range(5):
        assert near.ask("GET", META, headers=basic("otto", "guess")).status_code == 401
    answer = near.ask("GET", META, headers=basic("otto", "open sesame"))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["type"] == "urn:outbox:problem:too-many-attempts"
    assert near.ask("GET", META, headers=basic("vera", "open sesame")).status_code == 200
    assert far.ask("GET", META, headers=basic("otto", "open sesame")).status_code == 200


def test_names_that_are_sprayed_are_slowed_down(door: Callable[..., Http], monkeypatch: pytest.MonkeyPatch) -> None:
    """One password for many names, from one address: no more is told of wrong ones, and a right one lets in."""
    monkeypatch.setattr(auth, "_DELAY", 0.0)
    basics = Basic({"otto": (HASH, "operator"), "vera": (HASH, "viewer")}, throttle=Throttle(clock=lambda: 0.0))
    near, far = door(basics), door(basics, client="192.0.2.7")
    assert near.ask("GET", META, headers=basic("otto", "open sesame")).status_code == 200
    tried = [near.ask("GET", META, headers=basic(f"user{n}", "Winter2026")).status_code for n in range(30)]
    assert tried == [401] * 20 + [429] * 10
    assert near.ask("GET", META, headers=basic("vera", "wrong")).status_code == 429
    assert near.ask("GET", META, headers=basic("vera", "open sesame")).status_code == 200
    assert near.ask("GET", META, headers=basic("otto", "open sesame")).status_code == 200
    assert far.ask("GET", META, headers=basic("vera", "open sesame")).status_code == 200


def test_a_wrong_password_of_a_sprayed_address_takes_its_time(
    door: Callable[..., Http], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long for a user as for a name that there isn't, whose password isn't compared; a right one doesn't wait."""
    waits: list[float] = []
    compared: list[str] = []
    original = PasswordHash.matches

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    def matches(hashed: PasswordHash, password: str) -> bool:
        compared.append(password)
        return original(hashed, password)

    monkeypatch.setattr(auth, "asyncio", SimpleNamespace(get_running_loop=asyncio.get_running_loop, sleep=wait))
    monkeypatch.setattr(PasswordHash, "matches", matches)
    near = door(Basic({"vera": (HASH, "viewer")}, throttle=Throttle(clock=lambda: 0.0)))
    for number in range(20):
        assert near.ask("GET", META, headers=basic(f"user{number}", "x")).status_code == 401
    assert (len(compared), waits) == (20, [])
    for name in ("vera", "nobody"):
        assert near.ask("GET", META, headers=basic(name, f"of {name}")).status_code == 429
    assert near.ask("GET", META, headers=basic("vera", "open sesame")).status_code == 200
    assert compared[20:] == ["of vera", "open sesame"]
    assert len(waits) == 2
    assert all(0 < each <= 1 for each in waits)


def test_a_flood_from_an_address_keeps_no_user_of_it_out(
    museum: Shop, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While invented names are tried from a proxy or an office, right users of the same address, and others, get in."""
    asked, go_on = threading.Semaphore(0), threading.Event()

    async def wait(seconds: float) -> None:
        asked.release()
        async with asyncio.timeout(60):
            while not go_on.is_set():
                await asyncio.sleep(0.01)

    monkeypatch.setattr(auth, "asyncio", SimpleNamespace(get_running_loop=asyncio.get_running_loop, sleep=wait))
    users = {"vera": (HASH, Role.VIEWER), "otto": (HASH, Role.OPERATOR)}
    basics = Basic(users, throttle=Throttle(clock=lambda: 0.0))
    near, far = (ask(console_of(museum.outbox, authorizer=basics), client=at) for at in ("127.0.0.1", "192.0.2.7"))
    for number in range(20):
        assert near.ask("GET", META, headers=basic(f"user{number}", "x")).status_code == 401
    with ThreadPoolExecutor(20) as threads:
        flood = [threads.submit(near.ask, "GET", META, headers=basic(f"name{n}", "x")) for n in range(20)]
        try:
            for _ in flood:
                assert asked.acquire(timeout=60)
            assert near.ask("GET", META, headers=basic("vera", "open sesame")).status_code == 200
            assert far.ask("GET", META, headers=basic("otto", "open sesame")).status_code == 200
        finally:
            go_on.set()
        assert {each.result().status_code for each in flood} == {429}


def test_a_flood_of_guesses_is_counted_one_by_one(museum: Shop, ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once are no more than one after the other: a name's first few are compared, two at a time."""
    compared: list[str] = []
    go_on, first = threading.Event(), threading.Semaphore(0)

    def matches(_: PasswordHash, password: str) -> bool:
        compared.append(password)
        first.release()
        return not go_on.wait(60)

    monkeypatch.setattr(PasswordHash, "matches", matches)
    basics = Basic({"vera": (HASH, "viewer")}, throttle=Throttle(clock=lambda: 0.0))
    http = ask(console_of(museum.outbox, authorizer=basics))
    with ThreadPoolExecutor(20) as threads:
        flood = [threads.submit(http.ask, "GET", META, headers=basic("vera", f"guess{n}")) for n in range(20)]
        try:
            assert first.acquire(timeout=60)
        finally:
            go_on.set()
        codes = Counter(each.result().status_code for each in flood)
    assert len(compared) <= 6
    assert codes == {401: len(compared), 429: 20 - len(compared)}


def test_the_throttle_forgets_and_is_bounded() -> None:
    """Waiting doubles up to a limit, success and time forgive, and an attacker can't fill the memory."""
    now = [0.0]
    throttle = Throttle(free=2, longest=4.0, memory=100.0, most=3, clock=lambda: now[0])
    waits = []
    for _ in range(6):
        throttle.failed("otto")
        try:
            throttle.check("otto")
        except Problem as problem:
            assert problem.headers
            waits.append(int(problem.headers["Retry-After"]))
    assert waits == [1, 2, 4, 4, 4]
    now[0] += 101
    throttle.check("otto")
    throttle.failed("otto")
    throttle.check("otto")
    throttle.succeeded("otto")
    for name in range(50):
        throttle.failed(name)
    assert len(throttle) == 3


def test_a_header_counts_from_a_trusted_proxy_only(door: Callable[..., Http]) -> None:
    """The user that a proxy names is believed if it is one of trusted_proxies; the groups give the role."""
    trusted = TrustedHeader("X-User", groups="X-Groups", roles={"sre": "admin", "dev": "operator"}, default="viewer")
    said = {"X-User": "ann", "X-Groups": "staff, dev"}
    proxy, other = (door(trusted, client=at, trusted_proxies=["10.0.0.0/8"]) for at in ("10.1.1.1", "192.0.2.1"))
    assert proxy.ask("GET", META, headers=said).json()["role"] == "operator"
    assert proxy.ask("GET", META, headers={"X-User": "bob"}).json()["role"] == "viewer"
    assert proxy.ask("GET", META).status_code == 401
    assert other.ask("GET", META, headers=said).status_code == 401
    with pytest.raises(InvalidSettings, match="trusted_proxies"):
        door(trusted)


def test_several_ways_in(door: Callable[..., Http]) -> None:
    """AnyOf lets in by password or token, and asks for either."""
    way = AnyOf(
        Basic({"otto": (HASH, "operator")}), Bearer({hash_token(token_of("admin")): Principal.of("ada", "admin")})
    )
    http = door(way)
    assert http.ask("GET", META, headers=basic("otto", "open sesame")).json()["principal"] == "otto"
    assert http.ask("GET", META, headers=bearer("admin")).json()["principal"] == "ada"
    assert http.ask("GET", META).headers["www-authenticate"].startswith("Basic realm=")


def test_everybody_is_let_in_only_if_that_is_typed(door: Callable[..., Http]) -> None:
    """AllowAll is an admin, or what it is told; without an authorizer there is no console."""
    assert door(AllowAll()).ask("GET", META).json()["role"] == "admin"
    assert door(AllowAll("viewer")).ask("GET", META).json()["role"] == "viewer"


class Company:
    """An authorizer of an application, with a dependency of its own."""

    async def __call__(self, user: Annotated[str | None, Depends(lambda: "eve")], x_key: str = Header("")) -> object:
        return {"good": Principal.of(str(user), "operator"), "odd": "eve"}.get(x_key)


def of_function(x_key: Annotated[str, Header()] = "") -> Principal | None:
    """A plain function that refuses by an HTTPException, or sends to a login of its own."""
    if not x_key:
        raise HTTPException(307, headers={"Location": "/sso"})
    if x_key != "good":
        raise HTTPException(401, "no such key", headers={"WWW-Authenticate": "Key"})
    return Principal("eve", "Eve", frozenset({VIEW, "half:check"}))


def test_any_dependency_authorizes(door: Callable[..., Http]) -> None:
    """An application's own dependency, an async object or a function, says who it is."""
    http = door(Company())
    assert http.ask("GET", META, headers={"X-Key": "good"}).json()["principal"] == "eve"
    assert http.ask("GET", META).status_code == 401
    assert http.ask("GET", META, headers={"X-Key": "odd"}).status_code == 500
    http = door(of_function)
    assert http.ask("GET", META, headers={"X-Key": "good"}).json()["role"] == "viewer"
    assert (refused := http.ask("GET", META, headers={"X-Key": "bad"})).status_code == 401
    assert (refused.headers["www-authenticate"], refused.json()["detail"]) == ("Key", "no such key")
    assert http.ask("GET", META).headers["location"] == "/sso"


def test_a_permission_that_does_not_exist_is_refused() -> None:
    """A misspelt one would be missed at the first act only."""
    assert Principal("eve", "Eve", frozenset({VIEW, CANCEL})).role == "viewer"
    with pytest.raises(InvalidSettings, match="permission 'half:chek' must be one of: address:read, bulk_job:cancel"):
        Principal("eve", "Eve", frozenset({"half:chek"}))


def test_who_may_not_even_look_sees_nothing(door: Callable[..., Http]) -> None:
    """Without the permission to look, nothing is shown."""
    answer = door(lambda: Principal("eve", "Eve", frozenset())).ask("GET", META)
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:outbox:problem:forbidden")
    assert "'view'" in answer.json()["detail"]
