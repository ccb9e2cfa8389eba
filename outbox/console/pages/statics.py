"""The files that pages load: all of them ours or vendored, each under a name that changes with what is in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Static:
    """A file: ``name`` has the digest of what is in it, so that browsers may keep it for ever."""

    name: str
    content_type: str
    content: bytes


@cache
def by_file() -> dict[str, Static]:
    """Return the static files by the names that templates know them by."""
    files = {}
    for file in resources.files("outbox.console").joinpath("static").iterdir():
        stem, _, kind = file.name.rpartition(".")
        if kind in _TYPES:
            content = file.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:12]
            files[file.name] = Static(f"{stem}.{digest}.{kind}", _TYPES[kind], content)
    return files


@cache
def by_name() -> dict[str, Static]:
    """Return the static files by the names under which they are served."""
    return {static.name: static for static in by_file().values()}
