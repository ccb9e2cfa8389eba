"""A real Chromium, a console that is really served, and a town of two banks behind it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, create_engine

from outbox.console import Basic, create_console_router, hash_password
from outbox.embedded import ServerLike
from tests.console.browser.live import serving
from tests.console.browser.museum import Museum, furnish
from tests.console.browser.town import Town, a_town
from tests.console.browser.watch import Watch
from tests.kit.programs import program

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: Where the application has included the console.
PREFIX = "/ops/outbox"
#: Names that all lead to this machine, and are other sites to a browser.
RESOLVE = "MAP *.test 127.0.0.1"
#: Who may come in, with which role; the password is the name.
STAFF = {"anna": "admin", "otto": "operator", "vera": "viewer"}
PATIENCE_MS = 60_000

#: No process that imitates a graphics card, and no calls of the browser's own to its maker's hosts, which it repeats
#: again and again where nobody answers.
_ALONE = (
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
)

_NAMES = ("chromium", "chromium-browser", "google-chrome")


# Not of the session: while Playwright runs, its event loop is that of the main thread, and other tests want one.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A Chromium without a window, which asks no proxy."""
    named = os.environ.get("OUTBOX_TEST_BROWSER")
    executable = program(*([named] if named else _NAMES), package="chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)

    options = [*_ALONE, "--no-sandbox", "--disable-dev-shm-usage", f"--host-resolver-rules={RESOLVE}"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=options)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def fresh_engine(server: ServerLike, template: str) -> Iterator[Callable[[], Engine]]:
    """A function that makes an engine on another migrated database, for worlds that several tests share."""
    engines: list[tuple[str, Engine]] = []

    def make() -> Engine:
        name = f"browser_{len(engines)}"
        server.create_database(name, template=template)
        engine = create_engine(server.url(name))
        engines.append((name, engine))
        return engine

    yield make
    for name, engine in engines:
        engine.dispose()
        server.drop_database(name)


@pytest.fixture(scope="package")
def town(fresh_engine: Callable[[], Engine]) -> Iterator[Town]:
    """A town with a worker of each bank at work; tests act in it, each on accounts, keys and troubles of its own."""
    with a_town(fresh_engine) as town, town.at_work():
        yield town


@pytest.fixture(scope="package")
def passwords() -> Basic:
    """Who may come in; hashed as cheaply as can be, since it is not the hash that is tested."""
    return Basic({name: (hash_password(name, cost=4), role) for name, role in STAFF.items()})


class Serve(Protocol):
    """Serves a console over a town; returns where, without a slash at the end."""

    def __call__(self, town: Town, **options: Any) -> str: ...


@pytest.fixture(scope="package")
def serve(passwords: Basic) -> Iterator[Serve]:
    """A function that serves a console inside an application, under `PREFIX`."""
    with ExitStack() as stack:

        def start(town: Town, **options: Any) -> str:
            app = FastAPI()
            router = create_console_router(town.databases, **{"authorizer": passwords, **options})
            app.include_router(router, prefix=PREFIX)
            return f"http://127.0.0.1:{stack.enter_context(serving(app))}{PREFIX}"

        yield start


@pytest.fixture(scope="package")
def console(town: Town, serve: Serve) -> str:
    """Where the console of the town is served."""
    return serve(town)


@pytest.fixture(scope="package")
def museum(fresh_engine: Callable[[], Engine], serve: Serve) -> Iterator[Museum]:
    """A town with something of everything, and its console; for tests that only look."""
    with a_town(fresh_engine) as town, town.at_work():
        yield furnish(town, serve(town, environment="museum"))


#: Pages work without their scripts, too: a click before these run opens a page where a dialog is expected. So no click
#: is taken before they do; Playwright tries it again until it is.
_CLICKED_AFTER_SCRIPTS = """
const clicks = (pass) => document.documentElement.style.setProperty("pointer-events", pass)
if (document.readyState === "loading") {
  const begun = new MutationObserver(() => { clicks("none"); begun.disconnect() })
  begun.observe(document, { childList: true })
  addEventListener("load", () => clicks("auto"))
}
"""


class Visit(Protocol):
    """Opens a console in a browser of nobody else's, as one of the `STAFF` (None: as nobody); returns its page."""

    def __call__(self, at: str, user: str | None = "anna", **options: Any) -> Page: ...


def _open(browser: Browser, at: str, user: str | None, options: dict[str, Any]) -> tuple[Page, Watch]:
    origin = "{0.scheme}://{0.netloc}".format(urlsplit(at))
    if user is not None:
        options = {**options, "http_credentials": {"username": user, "password": user, "origin": origin}}
    context = browser.new_context(base_url=at.rstrip("/") + "/", service_workers="block", **options)
    context.set_default_timeout(PATIENCE_MS)
    watch = Watch(context, origin)
    context.add_init_script(_CLICKED_AFTER_SCRIPTS)
    return context.new_page(), watch


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    """What is watched in this test, the last page's last; whatever a browser complains of fails the test in the end."""
    watches: list[Watch] = []
    yield watches
    for watch in watches:
        watch.verify()


@pytest.fixture
def visit(browser: Browser, watches: list[Watch]) -> Iterator[Visit]:
    """A function that opens a console in a browser without any past."""
    with ExitStack() as stack:

        def open_page(at: str, user: str | None = "anna", **options: Any) -> Page:
            page, watch = _open(browser, at, user, options)
            stack.callback(page.context.close)
            watches.append(watch)
            return page

        yield open_page


@pytest.fixture(scope="module")
def toured() -> Iterator[dict[str, tuple[Page, Watch]]]:
    """The pages that tests of a module look at one after the other."""
    pages: dict[str, tuple[Page, Watch]] = {}
    yield pages
    for page, _ in pages.values():
        page.context.close()


@pytest.fixture
def tour(browser: Browser, watches: list[Watch], toured: dict[str, tuple[Page, Watch]]) -> Visit:
    """As `visit`, in one browser for all such tests of the module, one after the other: to open another takes time."""

    def open_page(at: str, user: str | None = "anna", **options: Any) -> Page:
        key = repr((at, user, options))
        if key not in toured:
            toured[key] = _open(browser, at, user, options)
        page, watch = toured[key]
        watch.forget()
        watches.append(watch)
        return page

    return open_page


@pytest.fixture
def page(tour: Visit, console: str) -> Page:
    """The console of the town, as anna sees it, who is an admin."""
    return tour(console)
