"""``python -m tests.interleave.mutants``: take one rule after the other out of the package, and see that it is missed.

Each mutant is a copy of the package in which one text stands in the place of another. It is caught if the exploration
of the meetings that it names, or a test that it names, fails on the copy. A text that the package doesn't have any more
fails as well: the mutant has to follow the rule to where it stands now.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from outbox import embedded

ROOT = Path(__file__).parents[2]
_LONGEST = 300.0
LINE = "{:72} {:44} {:>7}"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text of a module, and what stands in its place without the rule; ``by`` is who has to notice."""

    rule: str
    module: str
    text: str
    replacement: str
    by: str


#: The rules that are taken out.
MUTANTS = tuple(Mutant(**row) for row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutant"])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a mutant."""

    caught: bool
    seconds: float
    output: str


def mutated(mutant: Mutant, folder: Path) -> None:
    """Write a copy of the package without the rule.

    Raises:
        ValueError: the text doesn't stand there exactly once.
    """
    shutil.copytree(ROOT / "outbox", folder / "outbox", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "outbox" / mutant.module
    text = path.read_text()
    if text.count(mutant.text) != 1:
        raise ValueError(f"{mutant.module} has this {text.count(mutant.text)} times, not once: {mutant.text!r}")
    path.write_text(text.replace(mutant.text, mutant.replacement))


def command_of(mutant: Mutant) -> list[str]:
    """Return the command that is to fail on the copy."""
    if mutant.by.startswith("tests/"):
        options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout=120"]
        return [sys.executable, "-m", "pytest", *options, *mutant.by.split()]
    options = ["--stop", "--schedules", "150", "--hurts", "0"]
    return [sys.executable, "-m", "tests.interleave", "--pairs", mutant.by, *options]


def try_mutant(mutant: Mutant, url: str) -> Verdict:
    """Run what is to catch a mutant."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mutated(mutant, folder)
        # Tests import the package that stands beside them.
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        for each in ("migrations", "examples", "benchmarks", "docs"):
            (folder / each).symlink_to(ROOT / each)
        shutil.copy(ROOT / "pyproject.toml", folder)
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        if not mutant.by.startswith("tests/"):
            environment["OUTBOX_DATABASE_URL"] = url
        try:
            ran = subprocess.run(
                command_of(mutant),
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=_LONGEST,
            )
        except subprocess.TimeoutExpired:
            return Verdict(False, time.monotonic() - began, "it doesn't end")
    return Verdict(ran.returncode == 1, time.monotonic() - began, ran.stdout + ran.stderr)


def how(output: str) -> str:
    """Return the line of an output that says what was noticed."""
    lines = [line for line in output.splitlines() if line.strip()]
    of_test = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    of_order = [line for line in lines if " @ " not in line and "flows @" not in line and "Traceback" not in line]
    return next(iter(of_test or of_order), "")[:150]


def main() -> int:
    """Try all mutants, print a line for each, and fail if one is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.interleave.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose rule or module has this in it")
    parser.add_argument("--shard", default="1/1", help="which part of the mutants: 1/2, 2/2")
    parser.add_argument("--show", action="store_true", help="also print what was noticed of each")
    options = parser.parse_args()
    part, parts = map(int, options.shard.split("/"))
    chosen = [each for each in MUTANTS if options.only in f"{each.module} {each.rule}"][part - 1 :: parts]
    survived = []
    print(LINE.format("rule taken out", "caught by", "seconds"))
    with embedded.server([], durable=False) as server:
        for mutant in chosen:
            try:
                verdict = try_mutant(mutant, server.url("postgres"))
            except ValueError as error:
                verdict = Verdict(False, 0.0, str(error))
            by = mutant.by if verdict.caught else "NOTHING"
            print(LINE.format(mutant.rule, by, f"{verdict.seconds:.1f}"), flush=True)
            if not verdict.caught:
                survived.append(mutant)
            if verdict.caught and options.show:
                print(f"    {how(verdict.output)}", flush=True)
            if not verdict.caught:
                print(verdict.output[-3000:], flush=True)
    print(f"{len(chosen)} mutants, {len(survived)} survived")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
