"""The shipped alert rules and the dashboard: they use what workers serve, and point where there is a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from outbox import Message, Park
from outbox.telemetry import events
from outbox.telemetry.prometheus import DutyGauges, Meter
from outbox.worker import Worker
from outbox.worker.probes import serving
from tests.kit import wait_until
from tests.kit.programs import program
from tests.worker.conftest import Bench

ROOT = Path(__file__).parents[2]
FILES = ROOT / "outbox" / "telemetry" / "files"
ALERTS, DASHBOARD = FILES / "alerts.yml", FILES / "dashboard.json"


def rules() -> list[dict[str, Any]]:
    """Return the alert rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    """Yield all that rules and dashboard ask Prometheus for."""
    yield from (rule["expr"] for rule in rules())
    dashboard = json.loads(DASHBOARD.read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    yield from (each["definition"] for each in dashboard["templating"]["list"] if "definition" in each)


def served(bench: Bench) -> dict[str, set[str]]:
    """Return the names of all that a worker serves, with the labels of each."""
    registry = CollectorRegistry()
    meter = Meter(registry)
    worker = Worker(bench.outbox)
    bench.stack.enter_context(worker)
    wait_until(lambda: worker.health()["dispatch"].last_success, "the duties run")
    names: dict[str, set[str]] = {}
    for metric in vars(meter).values():
        for each in metric.values() if isinstance(metric, dict) else [metric]:
            if hasattr(each, "_labelnames"):
                for suffix in ("", "_total", "_bucket", "_count", "_sum"):
                    names[each._name + suffix] = {*each._labelnames, *(["le"] if suffix == "_bucket" else [])}
    for family in DutyGauges(worker).collect():
        names[family.name] = {label for sample in family.samples for label in sample.labels}
    return names


def test_they_use_what_is_served(new_bench: Callable[..., Bench]) -> None:
    """Each metric is one of a worker's, each label one of the metric's, each event one that is declared."""
    names = served(new_bench())
    codes = {kind.code for kind in vars(events).values() if isinstance(kind, type) and hasattr(kind, "code")}
    used = set()
    for expression in expressions():
        for name, matchers in re.findall(r"\b(outbox_\w+)(?:\{(.*?)\})?", expression):
            used.add(name)
            assert name in names, expression
            for label, value in re.findall(r'(\w+)[=!]~?"(.*?)"', matchers):
                assert label in names[name], expression
                assert label != "event" or set(value.split("|")) <= codes, expression
    assert len(used) > 15


def test_runbooks_are_there() -> None:
    """Each alert says what it means, and names a section of a page."""
    for rule in rules():
        notes = rule["annotations"]
        assert notes["summary"]
        assert notes["description"]
        page, _, anchor = notes["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, rule["alert"]


def test_the_dashboard_is_laid_out() -> None:
    """Panels have ids of their own, ask something, and don't cover each other."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        assert panel["targets"]
        taken |= cells


def test_the_rules_fire_as_they_should(tmp_path: Path) -> None:
    """Prometheus' own tests of rules: which alerts come of which series."""
    promtool = program("promtool", package="prometheus")
    for path in (ALERTS, Path(__file__).with_name("alerts_test.yml")):
        shutil.copy(path, tmp_path)
    command = [promtool, "test", "rules", "alerts_test.yml"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_prometheus_scrapes_a_worker(new_bench: Callable[..., Bench], tmp_path: Path) -> None:
    """A parked message becomes an alert that fires in a real Prometheus; of the rules, only the waits are shorter."""
    prometheus, bench = program("prometheus", package="prometheus"), new_bench()

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> Park:
        return Park("no such customer")

    worker = Worker(bench.outbox)
    with serving(worker, "127.0.0.1", 0) as server, worker:
        bench.send()
        wait_until(lambda: bench.inbox() == [("parked", 1)], "the message is parked")
        with bench.engine.begin() as connection:
            # That of this minute may be older than the park; without it, the next report takes another one.
            connection.execute(text("DELETE FROM outbox.stats_sample"))
        (tmp_path / "alerts.yml").write_text(re.sub(r"\bfor: \w+", "for: 1s", ALERTS.read_text()))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(tmp_path / "alerts.yml")],
            "scrape_configs": [
                {"job_name": "outbox", "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}]}
            ],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        log = (tmp_path / "log").open("w")
        command = [prometheus, f"--storage.tsdb.path={tmp_path / 'data'}", "--web.listen-address=127.0.0.1:0"]
        process = subprocess.Popen([*command, f"--config.file={tmp_path / 'prometheus.yml'}"], stderr=log, stdout=log)
        try:
            address = wait_until(lambda: _address(process, tmp_path / "log"), "Prometheus listens") or ""
            wait_until(lambda: _firing(address).get("OutboxMessagesParked"), "the alert fires")
            assert _firing(address)["OutboxMessagesParked"] == {"group": "mail", "topic": "paid", "severity": "warning"}
        finally:
            process.terminate()
            process.wait(60)
            log.close()


def _address(process: subprocess.Popen[bytes], log: Path) -> str | None:
    assert process.poll() is None, log.read_text()
    found = re.search(r"Listening on.*?address=(\S+)", log.read_text())
    return found[1] if found else None


def _firing(address: str) -> dict[str, dict[str, str]]:
    """Return the alerts that fire, by name, with their labels."""
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/alerts", timeout=60) as answer:
            alerts = json.load(answer)["data"]["alerts"]
    except OSError:  # it isn't ready so far
        return {}
    return {each["labels"].pop("alertname"): each["labels"] for each in alerts if each["state"] == "firing"}
