"""Transactional messages as tables next to your data, on PostgreSQL.

The public names are declared in ``__init__.pyi``, with the module that each comes from, and imported when first used,
so that ``import outbox`` costs next to nothing::

    from outbox import INJECTED, Message, Outbox, Settings
    from outbox.errors import AlreadyRolledBack
"""

import functools
import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


@functools.cache
def _homes() -> dict[str, str]:
    """Return the module of each public name, as the stub beside this file declares it."""
    stub = Path(__file__).with_suffix(".pyi").read_text("utf-8")
    return {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE)}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return ["__version__", *_homes()]
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module 'outbox' has no attribute {name!r}")
    value = getattr(importlib.import_module(_homes()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return ["__version__", *_homes()]
