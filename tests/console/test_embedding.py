"""The console as a part of an application: under a prefix, behind proxies, next to what the application does."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx
import pytest
from anyio.from_thread import BlockingPortal
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from sqlalchemy import Engine

from outbox.console import AllowAll, create_console_router
from outbox.errors import InvalidSettings
from outbox.operator.operator import Operator
from tests.console.web import Asker, Http, Shop, authorizer, bearer, console_of, token_of

LINK = re.compile(r"""(?:href|src|action)="([^"]*)\"""")


def of_application(shop: Shop, prefix: str = "/outbox") -> FastAPI:
    """An application with things of its own: handlers of errors, a catch-all, a prefix for the console."""
    app = FastAPI()

    @app.exception_handler(Exception)
    @app.exception_handler(HTTPException)
    def own(request: Request, error: Exception) -> PlainTextResponse:
        return PlainTextResponse("the application's own", 418)

    app.include_router(create_console_router(shop.outbox, authorizer=authorizer()), prefix=prefix)

    @app.get("/{rest:path}")
    def everything(rest: str) -> str:
        return f"the application has {rest}"

    return app


@pytest.fixture(scope="module")
def embedded(museum: Shop, ask: Asker) -> Http:
    """A console in an application, under /outbox."""
    return ask(of_application(museum), "admin")


def test_everything_is_below_the_prefix(embedded: Http) -> None:
    """API, pages and files are where the application put them, and every link is a path below."""
    assert embedded.ask("GET", "/outbox/api/v1/meta").json()["principal"] == "ada"
    page = embedded.ask("GET", "/outbox/")
    assert page.status_code == 200
    links = LINK.findall(page.text)
    assert any(link.startswith("/outbox/static/") for link in links)
    assert all(link.startswith(("/outbox/", "#", "data:", "?")) or link == "" for link in links), links
    for link in links:
        if "/static/" in link:
            file = embedded.as_role(None).ask("GET", link)
            assert (file.status_code, "immutable" in file.headers["cache-control"]) == (200, True)


def test_the_application_keeps_what_is_its_own(embedded: Http) -> None:
    """Its routes and its handlers of errors aren't ours, nor ours its."""
    assert embedded.ask("GET", "/api/v1/meta").json() == "the application has api/v1/meta"
    assert embedded.ask("GET", "/anything").headers.get("content-security-policy") is None
    for path, status in {"/outbox/api/v1/messages/42": 422, "/outbox/api/v1/messages?page_token=x": 400,
                         "/outbox/api/v1/nothing": 404}.items():  # fmt: skip
        answer = embedded.ask("GET", path)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.json()["instance"] == path.partition("?")[0]
    assert embedded.ask("PUT", "/outbox/api/v1/meta").json()["status"] == 405


def test_the_router_is_secured_by_itself(embedded: Http) -> None:
    """The application needs no dependency, and one that it adds counts too."""
    assert embedded.as_role(None).ask("GET", "/outbox/api/v1/meta").status_code == 401
    assert embedded.as_role(None).ask("GET", "/outbox/messages").headers["location"].startswith("/outbox/login?next=")


def test_a_dependency_of_the_application_counts_too(museum: Shop, ask: Asker) -> None:
    """What the application adds when it includes the router is asked first."""

    def locked() -> None:
        raise HTTPException(403, "closed today")

    app = FastAPI()
    router = create_console_router(museum.outbox, authorizer=AllowAll())
    app.include_router(router, prefix="/outbox", dependencies=[Depends(locked)])
    assert ask(app).ask("GET", "/outbox/api/v1/meta").json()["detail"] == "closed today"


@pytest.mark.parametrize("prefix", ["", "/a/b", "/{tenant}/outbox"])
def test_any_prefix_will_do(museum: Shop, ask: Asker, prefix: str) -> None:
    """None, a long one, or one with a parameter."""
    at = prefix.format(tenant="acme")
    answer = ask(of_application(museum, prefix), None).ask("POST", f"{at}/login", data={"token": token_of("viewer")})
    assert answer.headers["location"] == f"{at}/"
    assert f"Path={at or '/'};" in answer.headers["set-cookie"]


def test_without_a_prefix_the_rest_is_the_applications(museum: Shop, ask: Asker) -> None:
    """The route of the console matches only what the console has; this is why it overrides FastAPI's matching."""
    http = ask(of_application(museum, ""), "admin")
    assert http.ask("GET", "/api/v1/meta").json()["principal"] == "ada"
    assert http.ask("PUT", "/api/v1/meta").headers["allow"] == "GET"
    for path in ("orders", "api/v2/orders", "operations/1/nothing"):
        assert http.ask("GET", f"/{path}").json() == f"the application has {path}"


@pytest.mark.parametrize("keeps", [False, True])
def test_behind_a_proxy_that_takes_a_prefix_off(embedded: Http, ask: Asker, keeps: bool) -> None:
    """root_path says what the proxy takes off, whether the server puts it before the path again or not."""
    http = ask(embedded.app, "admin", root_path="/tools")
    page = http.ask("GET", "/tools/outbox/" if keeps else "/outbox/")
    assert page.status_code == 200
    links = [link for link in LINK.findall(page.text) if link.startswith("/")]
    assert links
    assert all(link.startswith("/tools/outbox/") for link in links)


def test_a_console_of_its_own_knows_its_prefix(museum: Shop, ask: Asker) -> None:
    """The standalone application has an option for what a proxy takes off."""
    http = ask(console_of(museum.outbox, root_path="/tools"))
    assert http.ask("GET", "/messages").headers["location"] == "/tools/login?next=%2Fmessages"
    assert http.ask("GET", "/nothing/at/all").headers["location"].startswith("/tools/login")


def test_a_trusted_proxy_may_name_its_prefix(museum: Shop, ask: Asker) -> None:
    """X-Forwarded-Prefix counts from a trusted proxy only, and only if it is a path."""
    app = FastAPI()
    app.include_router(
        create_console_router(museum.outbox, authorizer=authorizer(), trusted_proxies=["10.0.0.1"]), prefix="/outbox"
    )
    cases = (
        ("10.0.0.1", "/tools/", "/tools/outbox/"),
        ("10.0.0.2", "/tools", "/outbox/"),
        ("10.0.0.1", "//evil.test", "/outbox/"),
        ("10.0.0.1", "javascript:", "/outbox/"),
    )
    for client, said, expected in cases:
        http = ask(app, None, client=client)
        answer = http.ask("GET", "/outbox/messages", headers={"X-Forwarded-Prefix": said})
        assert answer.headers["location"].startswith(f"{expected}login?"), (client, said)


def test_two_consoles_in_one_application(museum: Shop, shop: Shop, ask: Asker) -> None:
    """Each shows its own database, in its own place."""
    app = FastAPI()
    for prefix, each in (("/one", museum), ("/two", shop)):
        app.include_router(create_console_router(each.outbox, authorizer=authorizer()), prefix=prefix)
    names = [
        ask(app, "viewer").ask("GET", f"{at}/api/v1/meta").json()["databases"][0]["name"] for at in ("/one", "/two")
    ]
    assert names == [museum.engine.url.database, shop.engine.url.database]


def test_the_lifespan_of_the_router_closes_its_connections(
    museum: Shop, opened: list[Engine], portal: BlockingPortal
) -> None:
    """When the application ends, so do the console's connections."""
    app = of_application(museum)

    async def live() -> bool:
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
            answer = await client.get("http://localhost/outbox/api/v1/messages", headers=bearer("viewer"))
            assert answer.status_code == 200
            before = opened[-1].pool
        return before is opened[-1].pool

    assert not portal.call(live)


def test_any_source_will_do(museum: Shop, ask: Asker) -> None:
    """An Outbox, an engine, a URL, several by name, or an Operator of the application."""
    url = museum.engine.url
    operator = Operator.open({"mine": museum.engine}, museum.outbox.settings)
    named = {"mine": url.render_as_string(hide_password=False)}
    for source, name in (
        (museum.engine, "console_museum"),
        (url, "console_museum"),
        (named, "mine"),
        (operator, "mine"),
    ):
        router = create_console_router(source, authorizer=AllowAll("viewer"), read_only=True)
        app = FastAPI(routes=router.routes)
        assert ask(app).get("/meta").json()["databases"][0]["name"] == name
        assert len(ask(app).get("/messages").json()["items"]) > 5


def test_options_that_can_not_be_are_told_at_once(museum: Shop) -> None:
    """Two databases of a name, or settings for an Operator that has its own."""
    with pytest.raises(InvalidSettings, match="two databases are named"):
        create_console_router({"a": museum.engine}, authorizer=AllowAll(), databases={"a": museum.engine})
    operator = Operator.open({"a": museum.engine}, museum.outbox.settings)
    with pytest.raises(InvalidSettings, match="an Operator has its databases"):
        create_console_router(operator, authorizer=AllowAll(), databases={"b": museum.engine})
    with pytest.raises(TypeError, match="authorizer"):
        create_console_router(museum.outbox)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="a console has no option readonly"):
        create_console_router(museum.outbox, authorizer=AllowAll(), readonly=True)  # type: ignore[call-arg]


def test_without_the_extra_the_error_names_it() -> None:
    """Importing the console without FastAPI says what to install; importing outbox needs neither."""
    code = "import sys; sys.modules['fastapi'] = None\nimport outbox\nimport outbox.console"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "pip install 'outbox-postgres[console]'" in ran.stderr
    code = "import sys, outbox\nassert not {'fastapi', 'outbox.console', 'outbox.operator'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).returncode == 0
