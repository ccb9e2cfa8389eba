"""The limits of the house: how large each part may be. ``python -m tests.house.limits`` writes lower ones.

The numbers are in ``limits.toml``. A test fails where one is exceeded, and where one has more room than `ROOM`: so they
only fall. A limit is raised by hand, with a line in ``[because]`` that begins with the new number.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import outbox
from outbox.database.tables import common_tables, consumer_tables, producer_tables
from tests.house.checkout import ROOT, files

FILE = Path(__file__).with_suffix(".toml")
#: The part of a limit that may be unused.
ROOM = 0.03
#: Public namespaces beside `outbox` itself.
NAMESPACES = ("console", "database/migration", "embedded", "errors", "telemetry/events", "testing", "worker")
#: What a message passes through, as ARCHITECTURE.md has a reader go through it; a name that isn't there counts nothing.
HEART = "the heart"
_HEART = ("message", "database", "calling", "producer", "dispatch", "check", "prune", "consumer", "worker")
#: Limits, or what there is: a number by its section and its name.
Numbers = dict[str, dict[str, int]]

_HEAD = """\
# How large each part of the house may be; a test fails where one is larger, or smaller by more than 3 %.
# `make limits` writes what is lower by now. To raise a limit, change it here, and say why in [because]:
#
#     [because]
#     "lines.outbox/check" = "905: why these lines couldn't be taken out elsewhere"
#
# After a merge with conflicts here: take either side, then `make limits`.
"""
_COMMENTS = {
    "lines": "as `wc -l` counts; outbox/*.py are the modules beside the folders, the heart is what a message passes",
    "modules": "files that end in .py",
    "numbers": "tables of both sides; public names; fields of Settings; files of outbox/ that name the widest act",
    "walks": "modules of outbox/ that a message, an act or a comparison passes through; tests/house/test_walks.py",
}


def files_of(folder: str) -> list[Path]:
    """Return the Python files of a part: those below a folder, at the top of one (``outbox/*.py``), or of the heart."""
    if folder == HEART:
        return [ROOT / "outbox" / "app.py", *(path for each in _HEART for path in files_of(f"outbox/{each}"))]
    if folder.endswith("/*.py"):
        return sorted((ROOT / folder).parent.glob("*.py"))
    return files(folder, ".py")


def lines_of(paths: Iterable[Path]) -> int:
    """Return how many lines there are, as ``wc -l`` counts: the ends of lines."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def parts() -> list[str]:
    """Return what has limits of its own: the package and each of its folders, the tests, the migrations."""
    folders = sorted({path.relative_to(ROOT / "outbox").parts[0] for path in (ROOT / "outbox").glob("*/**/*.py")})
    return ["outbox", HEART, "outbox/*.py", *(f"outbox/{each}" for each in folders), "tests", "migrations"]


def names_in(path: Path) -> set[str]:
    """Return the public names of a module: those of its ``__all__``, or what it defines and exports."""
    tree = ast.parse(path.read_text("utf-8"))
    found: set[str] = set()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=ast.List(elts)):
                return {str(each.value) for each in elts if isinstance(each, ast.Constant)}
            case ast.ImportFrom(module=str(module), names=[ast.alias("*")]):
                found |= names_in((ROOT / module.replace(".", "/")).with_suffix(".py"))
            case ast.ImportFrom():
                found |= {each.name for each in node.names if each.asname == each.name}
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
    return {name for name in found if not name.startswith("_")}


def act_files() -> int:
    """Return how many files of the package name the widest act: the one that declares it and those that import it.

    That is what is by hand about an act: whatever is made from its row doesn't name it.
    """
    trees = {path: ast.parse(path.read_text("utf-8")) for path in files_of("outbox")}
    declared: set[str] = set()
    imported: defaultdict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(name)], value=ast.Call(ast.Name("Declaration" | "Act"))):
                    declared.add(name)
                case ast.ImportFrom():
                    for each in node.names:
                        imported[each.name].add(path)
                case ast.Attribute(ast.Name("acts"), name):
                    imported[name].add(path)
    return max((1 + len(imported[name]) for name in declared), default=1)


def measure() -> Numbers:
    """Return what there is now, by the names of the limits; walks are measured by the tests that go them."""
    tables = {name for make in (common_tables, producer_tables, consumer_tables) for name in make("outbox").tables}
    names = {f"names of outbox.{each.replace('/', '.')}": _face(each) for each in NAMESPACES}
    return {
        "lines": {part: lines_of(files_of(part)) for part in parts()},
        "modules": {part: len(files_of(part)) for part in parts()},
        "numbers": {
            "tables": len(tables),
            "names of outbox": len(outbox.__all__),
            "names of Outbox": sum(not name.startswith("_") for name in dir(outbox.Outbox)),
            **{name: len(names_in(path)) for name, path in names.items()},
            "settings": len(fields(outbox.Settings)),
            "files of an act": act_files(),
        },
    }


def _face(namespace: str) -> Path:
    path = ROOT / "outbox" / namespace
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def read(text: str) -> tuple[Numbers, dict[str, str]]:
    """Return the limits and the reasons that a file of limits has."""
    found = tomllib.loads(text)
    because = found.pop("because", {})
    return found, because


def difference(name: str, limit: int | None, there: int) -> str | None:
    """Return what is wrong with a limit, and the number to write; None if nothing is.

    ``name`` is its section and its name, with a dot between.
    """
    if limit is None:
        return f"{name} has no limit: write {there}"
    if there > limit:
        return (
            f"{name}: {there}, and {limit} are allowed: take {there - limit} out; "
            f'or write {there}, and below [because] "{name}" = "{there}: why"'
        )
    if limit - there > ROOM * limit:
        how = "by hand" if name.startswith("walks.") else "make limits"
        return f"{name}: {there}, and {limit} are allowed: write {there} ({how})"
    return None


def difference_of_walk(name: str, passed: Collection[str]) -> str | None:
    """Return what is wrong with the limit of a walk that passed these modules, and lists them; None if nothing is."""
    limits, _ = read(FILE.read_text("utf-8"))
    said = difference(f"walks.{name}", limits.get("walks", {}).get(name), len(passed))
    return said and "\n".join([said, *passed])


def differences(limits: Mapping[str, Mapping[str, int]], there: Numbers) -> Iterator[str]:
    """Return what is wrong with the limits of the sections that were measured."""
    for section, numbers in there.items():
        allowed = limits.get(section, {})
        for name, number in numbers.items():
            if said := difference(f"{section}.{name}", allowed.get(name), number):
                yield said
        for name in allowed.keys() - numbers.keys():
            yield f"{section}.{name} isn't there any more: take its line out (make limits)"


def raised(before: Numbers, now: Numbers, because: Mapping[str, str]) -> Iterator[str]:
    """Return each limit that is higher than before, and has no reason that begins with its number."""
    for section, numbers in now.items():
        for name, limit in numbers.items():
            was = before.get(section, {}).get(name)
            key = f"{section}.{name}"
            if was is not None and limit > was and not _is_for(because.get(key), limit):
                yield f'{key} rose from {was} to {limit}: write below [because] "{key}" = "{limit}: why"'


def outdated(limits: Numbers, because: Mapping[str, str]) -> Iterator[str]:
    """Return each reason that is for another number than the limit."""
    for key, why in because.items():
        section, _, name = key.partition(".")
        limit = limits.get(section, {}).get(name)
        if limit is None or not _is_for(why, limit):
            yield f"[because] {key} = {why!r} must begin with its limit, {limit}, or go (make limits)"


def _is_for(why: str | None, limit: int) -> bool:
    number, _, text = (why or "").partition(":")
    return number == str(limit) and bool(text.strip())


def versions() -> list[str]:
    """Return the texts that the file of limits had at its last commits, newest first; none without git."""

    def git(*command: str) -> str:
        ran = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        return ran.stdout if ran.returncode == 0 else ""

    path = FILE.relative_to(ROOT).as_posix()
    try:
        commits = git("log", "-n", "5", "--format=%H", "--", path).split()
        return [text for commit in commits if (text := git("show", f"{commit}:./{path}"))]
    except OSError:
        return []


def lowered(limits: Numbers, there: Numbers) -> Numbers:
    """Return the limits that are to be written: none is raised; what is new gets its own, what is gone loses it."""
    return {
        **{section: dict(numbers) for section, numbers in limits.items() if section not in there},
        **{
            section: {name: min(number, limits.get(section, {}).get(name, number)) for name, number in numbers.items()}
            for section, numbers in there.items()
        },
    }


def written(limits: Numbers, because: Mapping[str, str]) -> str:
    """Return the text of the file of limits; a reason for another number than its limit is left out."""
    lines = [_HEAD]
    for section, comment in _COMMENTS.items():
        lines += [f"# {comment}", f"[{section}]"]
        lines += [f'"{name}" = {number}' for name, number in limits.get(section, {}).items()]
        lines.append("")
    kept = {
        key: why
        for key, why in because.items()
        if _is_for(why, limits.get(key.partition(".")[0], {}).get(key.partition(".")[2], -1))
    }
    lines += ["[because]", *(f'"{key}" = "{why}"' for key, why in kept.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write lower limits where less is there; or say what is above its limit, write nothing, and return 1."""
    limits, because = read(FILE.read_text("utf-8")) if FILE.exists() else ({}, {})
    there = measure()
    new = lowered(limits, there)
    if left := list(differences(new, there)):
        print(*left, sep="\n", file=sys.stderr)  # noqa: T201 - a command
        return 1
    FILE.write_text(written(new, because), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
