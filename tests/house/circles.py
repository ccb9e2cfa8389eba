"""Circles of imports in the package: at import, in a function, or for types alone (``TYPE_CHECKING``)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path


def circles(package: Path) -> list[list[str]]:
    """Return the groups of modules of which each imports all others, directly or through them; the largest first."""
    modules = {_name(path, package): path for path in sorted(package.rglob("*.py"))}
    imports = {name: set(_imported(path, name, modules)) for name, path in modules.items()}
    reached = {name: _reached(name, imports) for name in imports}
    found = {
        name: frozenset(other for other in reached[name] if name in reached[other])
        for name in imports
        if name in reached[name]
    }
    return sorted(map(sorted, set(found.values())), key=lambda circle: (-len(circle), circle))


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, own: str, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            deep = [f"{node.module}.{each.name}" for each in node.names]
            names = [name if name in modules else node.module for name in deep]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        yield from (name for name in names if name in modules and name != own)


def _reached(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = list(imports[start])
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += imports[name]
    return found
