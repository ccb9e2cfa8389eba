"""The files of examples/deploy: well formed by the tools of their kind, safe by our rules, and true of the command."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser
from sqlalchemy import Engine
from yamllint import linter
from yamllint.config import YamlLintConfig

from outbox import Settings
from tests.cli.conftest import run_cli
from tests.kit import Tables, wait_until

HERE = Path(__file__).parents[2] / "examples" / "deploy"
RULES = """
extends: default
rules:
  line-length: {max: 120}
  braces: {max-spaces-inside: 0}
  document-start: disable
  octal-values: disable
"""
KUBERNETES = [*yaml.safe_load_all((HERE / "kubernetes.yaml").read_text())]
COMPOSE = yaml.safe_load((HERE / "compose.yaml").read_text())
UNIT = (HERE / "outbox-worker.service").read_text()
DOCKERFILE = DockerfileParser(path=str(HERE / "Dockerfile"), env_replace=False)


def resource(kind: str) -> Any:
    """Return the one resource of a kind."""
    (found,) = (each for each in KUBERNETES if each["kind"] == kind)
    return found


def seconds(text: str) -> int:
    """Return a duration of compose, which is in seconds here."""
    return int(text.removesuffix("s"))


# --- well formed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_yaml(name: str) -> None:
    """The files have the style of YAML that yamllint knows."""
    problems = linter.run((HERE / name).read_text(), YamlLintConfig(RULES))
    assert [str(problem) for problem in problems] == []


@pytest.mark.filterwarnings("ignore")  # of the validator's own dependencies
def test_kubernetes() -> None:
    """Each resource fits the schema of its kind, with no field that it doesn't have."""
    assert [each["kind"] for each in KUBERNETES] == ["Job", "Deployment", "PodDisruptionBudget"]
    for each in KUBERNETES:
        kubernetes_validate.validate(each, "1.37", strict=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd(tmp_path: Path) -> None:
    """systemd knows each line of the unit, and finds no mistake."""
    unit = tmp_path / "outbox-worker.service"
    unit.write_text(UNIT.replace("/srv/shop/venv/bin/outbox", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- safe -------------------------------------------------------------------------------------------------------------


def test_image_rules() -> None:
    """Pinned bases, nobody's privileges, the worker as process 1, no secret, and nothing copied that isn't there."""
    lines = DOCKERFILE.structure
    by_name: dict[str, list[str]] = {}
    for line in lines:
        by_name.setdefault(line["instruction"], []).append(line["value"])
    assert all(re.fullmatch(r"python:3\.\d+-slim( AS \w+)?", base) for base in by_name["FROM"])
    assert by_name["USER"] == ["65532:65532"]
    assert lines.index(next(line for line in lines if line["instruction"] == "USER")) > max(
        number for number, line in enumerate(lines) if line["instruction"] in {"RUN", "COPY"}
    )
    assert by_name["ENTRYPOINT"] == ['["outbox"]']
    assert not {"ADD", "ARG", "MAINTAINER"} & set(by_name)
    assert not re.search(r"(?i)url|password|secret|token", " ".join(by_name["ENV"]))
    for copied in by_name["COPY"]:
        source = copied.split()[0]
        assert source.startswith("--from=build") or (HERE / source).is_file()


@pytest.mark.parametrize("kind", ["Job", "Deployment"])
def test_pod_rules(kind: str) -> None:
    """No root, no token, no variables of other services, a file system that can't be written, secrets as files."""
    pod = resource(kind)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    for container in pod["containers"]:
        assert not container["image"].endswith(":latest")
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert "OUTBOX_DATABASE_URL" not in {each["name"] for each in container["env"]}


def test_one_migration() -> None:
    """The tables are upgraded once, by a job of its own, before the workers that need them start."""
    assert resource("Job")["spec"]["template"]["spec"]["containers"][0]["args"] == ["db", "upgrade"]
    assert "initContainers" not in resource("Deployment")["spec"]["template"]["spec"]
    migrate = COMPOSE["services"]["migrate"]
    assert migrate["command"] == ["db", "upgrade"]
    assert COMPOSE["services"]["worker"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"


def test_drain_is_shorter_than_the_grace_period() -> None:
    """What stops a worker waits longer than the worker does for its handlers."""
    deployment = resource("Deployment")["spec"]["template"]["spec"]
    drain = {each["name"]: each["value"] for each in deployment["containers"][0]["env"]}["OUTBOX_DRAIN_TIMEOUT"]
    assert deployment["terminationGracePeriodSeconds"] >= int(drain) + 10
    worker = COMPOSE["services"]["worker"]
    assert seconds(worker["stop_grace_period"]) >= int(worker["environment"]["OUTBOX_DRAIN_TIMEOUT"]) + 10
    unit = dict(re.findall(r"(?m)^(TimeoutStopSec|KillMode)=(.+)$", UNIT))
    assert unit["KillMode"] == "mixed"
    (drain,) = re.findall(r"OUTBOX_DRAIN_TIMEOUT=(\d+)", UNIT)
    assert int(unit["TimeoutStopSec"]) >= int(drain) + 10


def test_no_secret_in_the_environment() -> None:
    """Passwords are in files that only the service can read."""
    for service in COMPOSE["services"].values():
        for name in service.get("environment", {}):
            assert not re.search("URL|PASSWORD", name) or name.endswith("_FILE")
    assert "LoadCredential=database-url:" in UNIT
    assert "OUTBOX_DATABASE_URL=" not in UNIT


# --- true -------------------------------------------------------------------------------------------------------------


def commands() -> list[list[str]]:
    """Return each command of ours that is in the files."""
    pods = [resource(kind)["spec"]["template"]["spec"]["containers"][0]["args"] for kind in ("Job", "Deployment")]
    services = [service["command"] for service in COMPOSE["services"].values() if "command" in service]
    (unit,) = re.findall(r"(?m)^ExecStart=\S+ (.+)$", UNIT)
    (image,) = (yaml.safe_load(line["value"]) for line in DOCKERFILE.structure if line["instruction"] == "CMD")
    return [*pods, *services, unit.split(), image]


def test_commands() -> None:
    """The command knows them, with their options."""
    for arguments in commands():
        words = [word for word in arguments if re.fullmatch("[a-z]+", word)]
        shown = run_cli(*words, "--help").out
        assert all(option in shown for option in arguments if option.startswith("--")), arguments


def test_variables() -> None:
    """The settings know all the variables, or that they aren't theirs."""
    found = set(
        re.findall(r"OUTBOX_[A-Z_]+(?==| *:|,)", "\n".join(p.read_text() for p in HERE.iterdir() if p.is_file()))
    )
    assert found >= {"OUTBOX_DATABASE_URL_FILE", "OUTBOX_DRAIN_TIMEOUT", "OUTBOX_APP"}
    Settings.from_env(dict.fromkeys(found - {"OUTBOX_CONSOLE_PORT"}, "30"))


def test_it_runs(engine: Engine, tmp_path: Path) -> None:
    """The module of the image works with a mounted secret, and SIGTERM drains."""
    secret = tmp_path / "database-url"
    secret.write_text(engine.url.render_as_string(hide_password=False) + "\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    environment |= {"OUTBOX_DATABASE_URL_FILE": str(secret), "OUTBOX_APP": "shop:outbox"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    code = "from outbox.cli import main; main()"
    worker = subprocess.Popen([sys.executable, "-c", code, "run"], cwd=HERE, env=environment)
    try:
        reports = Tables(engine)
        wait_until(
            lambda: worker.poll() is not None or reports.value("SELECT count(*) FROM outbox.worker") == 1,
            "the worker reports, or has ended",
        )
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
