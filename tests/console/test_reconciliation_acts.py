"""What operators order of reconciliations in the console: who may, what is asked before, and what is carried out."""

from __future__ import annotations

import threading
from uuid import UUID, uuid4

import pytest

from outbox.reconcile.duty.reconciliation import JobReconciler, reconcilers
from outbox.reconcile.duty.repairs import Repairs
from tests.console.reconciled import Reconciled, reconciled
from tests.console.test_pages_look import well_made
from tests.console.visitor import Page, Visitor
from tests.console.web import GROUP, TOPIC, Http, Shop, console_of
from tests.kit.runs import take_turn
from tests.operator.health import report, sql

RUNS, ORDERS = "/reconciliations/runs", "/reconciliations/orders"
ORDER = "/reconciliations/schedules/nightly/order"


@pytest.fixture(scope="module")
def reconciler(shop: Shop) -> JobReconciler:
    """The reconciliation of the shop, which a worker reports."""
    shop.outbox.reconciliation("nightly", every=86_400, job={"window": {"grace": 0.0}})
    (found,) = reconcilers(shop.outbox, threading.Event())
    assert isinstance(found, JobReconciler)
    options = {"cron": None, "every": 86_400.0, "timezone": "UTC", "pairs": [list(pair) for pair in found.pairs]}
    declared = {"kind": "reconciliation", "topic": "", "group": None, "name": "nightly", "options": options}
    report(shop.engine, handlers=[declared])
    # However long the tests of this module take, it is alive.
    sql(shop.engine, "UPDATE outbox.worker SET seen_at = seen_at + interval '1 day'")
    take_turn(shop.engine, shop.outbox)
    return found


@pytest.fixture
def found(shop: Shop, reconciler: JobReconciler) -> Reconciled:
    """A run of its own, with a message that is missing and one that is parked."""
    return reconciled(shop)


def repaired(shop: Shop, reconciler: JobReconciler) -> None:
    """Have a worker carry out the repairs that are ordered."""
    with shop.engine.connect() as connection:
        Repairs([reconciler], shop.outbox.settings.schema)(connection, connection, lambda: False)


def result_of(http: Http, run: UUID, message: UUID) -> str | None:
    """Return what came of a finding."""
    result: str | None = http.get(f"{RUNS}/{run}/findings/{message}").json()["finding"]["result"]
    return result


def test_a_viewer_orders_nothing(acting: Http, found: Reconciled) -> None:
    """Neither by the API nor by a page, which doesn't offer it either."""
    viewer = acting.as_role("viewer")
    assert viewer.post(ORDER).status_code == 403
    assert viewer.post(f"{RUNS}/{found.run}/repair", {"reason": "why"}).status_code == 403
    assert viewer.get(f"{RUNS}/{found.run}/repair").status_code == 403
    visitor = Visitor(viewer)
    for path in ("reconcile?schedule=nightly", f"repair?run_id={found.run}"):
        assert visitor.go(f"acts/{path}").status == 403
    for path in ("", f"/{found.run}", f"/{found.run}/findings/{found.missing}"):
        page = visitor.go(f"reconciliations{path}")
        assert not [href for href, _ in page.links if "repair" in href or "order" in href]
    for name in ("reconcile", "repair"):
        data = {"schedule": "nightly", "run_id": str(found.run), "reason": "why"}
        answer = viewer.ask("POST", f"/acts/{name}", data=data, headers={"Sec-Fetch-Site": "same-origin"})
        assert answer.status_code == 403
    assert acting.get(ORDERS).json()["items"] == []
    assert result_of(acting, found.run, found.missing) is None


def test_another_site_orders_nothing(acting: Http, found: Reconciled) -> None:
    """A form of another site is refused, whoever is logged in; a link orders nothing."""
    forms = {
        "reconcile": {"schedule": "nightly"},
        "repair": {"run_id": str(found.run), "reason": "w", "kind": "missing"},
    }
    for path, data in forms.items():
        for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
            answer = acting.ask("POST", f"/acts/{path}", data=data, headers=headers)
            assert answer.status_code == 403
        assert acting.ask("GET", f"/acts/{path}", params=data).status_code == 200
    assert acting.get(ORDERS).json()["items"] == []
    assert str(found.run) not in str(acting.get("/bulk-jobs").json()["items"])


def test_a_console_that_only_reads_orders_nothing(ask: object, shop: Shop, found: Reconciled) -> None:
    """Not even for its admin."""
    viewing: Http = ask(console_of(shop.outbox, read_only=True), "admin")  # type: ignore[operator]
    assert viewing.post(ORDER).status_code == 403
    assert viewing.post(f"{RUNS}/{found.run}/repair", {"reason": "why"}).status_code == 403


def test_a_dry_run(acting: Http, shop: Shop, reconciler: JobReconciler) -> None:
    """Ordered on the page, it waits for a worker, and then is in the list under the operator's name."""
    visitor = Visitor(acting).as_role("operator")
    page = visitor.go("reconciliations")
    well_made(page)
    page = visitor.go(page.link("Dry run…"))
    well_made(page)
    assert "Nothing is repaired in a dry run" in page.text
    page = visitor.send(page.form("/reconcile"), reason="to see")
    assert "Ordered: a worker takes it up" in page.text
    assert "a dry run ordered by otto" in page.text
    assert "Dry run…" not in page.text
    (order,) = acting.get(ORDERS).json()["items"]
    assert (order["schedule"], order["dry_run"], order["requested_by"]) == ("nightly", True, "otto")
    assert acting.post(ORDER).status_code == 409
    take_turn(shop.engine, shop.outbox)
    newest = acting.get(f"{RUNS}?page_size=1").json()["items"][0]
    assert (newest["ordered_by"], newest["applied"], newest["schedule"]) == ("otto", False, None)
    assert acting.get(ORDERS).json()["items"] == []
    (audited,) = acting.get("/audit?action=reconcile").json()["items"]
    assert (audited["actor"], audited["target"], audited["reason"]) == ("otto", "nightly", "to see")
    assert audited["origin"]["via"] == "console"


def test_run_now_by_the_api(acting: Http, shop: Shop, reconciler: JobReconciler) -> None:
    """With what the order says; what no worker has is refused, and says what there is."""
    answer = acting.post(ORDER, {"topic": TOPIC, "group": GROUP, "reason": "now"})
    assert (answer.status_code, answer.json()["dry_run"]) == (202, False)
    take_turn(shop.engine, shop.outbox)
    refused = acting.post(ORDER.replace("nightly", "weekly"))
    assert refused.status_code == 409
    assert "there is nightly" in refused.json()["detail"]


def ordered(visitor: Visitor, page: Page) -> Page:
    """Confirm a repair, and return the page of its bulk job."""
    well_made(page)
    return visitor.send(page.form("/repair"), reason="lost inbox")


def test_a_repair_on_the_pages(acting: Http, shop: Shop, reconciler: JobReconciler, found: Reconciled) -> None:
    """From the run to the question, to the bulk job with its progress and outcome, and back to what became of it."""
    visitor = Visitor(acting).as_role("operator")
    page = visitor.go(f"reconciliations/{found.run}")
    well_made(page)
    page = visitor.go(page.link("Repair all by the policy…"))
    assert f"Repair what run {found.run} has found?" in page.text
    assert "repair 1 message of group" in page.text
    page = ordered(visitor, page)
    assert "A worker with the role reconcile takes it up." in page.text
    repaired(shop, reconciler)
    page = visitor.go(visitor.at)
    assert "1 of 1" in page.text
    assert "resend: sends it once more under its id" in page.text
    page = visitor.go(page.link("this run"))
    assert result_of(acting, found.run, found.missing) == "done"
    assert "Repair all by the policy…" not in page.text
    (audited,) = acting.get(f"/audit?action=resend&target={found.missing}").json()["items"]
    assert audited["actor"] == "otto"
    assert audited["reason"].endswith("missing; lost inbox")


def test_one_finding_is_repaired(acting: Http, shop: Shop, reconciler: JobReconciler, found: Reconciled) -> None:
    """By the repair that the operator chose, though the policy only reports it."""
    visitor = Visitor(acting).as_role("operator")
    page = visitor.go(f"reconciliations/{found.run}/findings/{found.parked}")
    ordered(visitor, visitor.go(page.link("Retry…")))
    repaired(shop, reconciler)
    assert result_of(acting, found.run, found.parked) == "done"
    assert result_of(acting, found.run, found.missing) is None
    page = visitor.go(f"reconciliations/{found.run}/findings/{found.parked}")
    assert "Retry…" not in page.text


def test_a_repair_by_the_api(acting: Http, shop: Shop, reconciler: JobReconciler, found: Reconciled) -> None:
    """Previewed, ordered once however often it is sent, with what was shown."""
    path, operator = f"{RUNS}/{found.run}/repair", acting.as_role("operator")
    preview = operator.get(f"{path}?kind=missing").json()
    assert (preview["number"], preview["choices"], len(preview["workers"])) == (1, ["resend"], 1)
    assert operator.post(path, {"kind": "missing", "reason": "why", "number": 2}).status_code == 409
    assert operator.post(path, {"kind": "missing"}).status_code == 422
    assert operator.post(path, {"kind": "missing", "repair": "park", "reason": "why"}).status_code == 422
    assert operator.post(f"{RUNS}/{uuid4()}/repair", {"reason": "why"}).status_code == 404
    assert operator.post(path, {"kind": "missing", "reason": "why", "rate": 0}).status_code == 422
    body, key = {"kind": "missing", "reason": "why", "number": 1, "rate": 50}, {"Idempotency-Key": "once"}
    first, second = (operator.post(path, body, headers=key) for _ in range(2))
    assert (first.status_code, first.json()["id"]) == (202, second.json()["id"])
    assert first.headers["location"].endswith(f"/bulk-jobs/{first.json()['id']}")
    repaired(shop, reconciler)
    job = acting.get(f"/bulk-jobs/{first.json()['id']}").json()
    assert (job["state"], job["done"], job["requested_by"], job["rate"]) == ("done", 1, "otto", 50)
    assert operator.post(path, {"kind": "missing", "reason": "again"}).status_code == 409


def test_a_finding_that_no_worker_repairs(acting: Http, shop: Shop, found: Reconciled) -> None:
    """The question says that the repair would wait."""
    report(shop.engine, handlers=[])
    page = Visitor(acting).go(f"acts/repair?run_id={found.run}")
    assert "no living worker with the role reconcile" in page.text
