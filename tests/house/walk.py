"""Which modules of the package a call passes through: those of which a function runs, here and in new threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import outbox

_PACKAGE = Path(outbox.__file__).parent


def modules_of(act: Callable[[], object]) -> list[str]:
    """Run ``act`` and return the modules whose functions it called, in the order in which it came to them.

    The bodies of modules and classes (imports) don't count, nor do generated functions such as ``__init__`` of a
    dataclass, which have no line of their own.
    """
    passed: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and path.is_relative_to(_PACKAGE) and code.co_name != "<module>":
            is_class_body = "__qualname__" in code.co_names and "__module__" in code.co_names
            if not is_class_body:
                passed[".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)] = None

    # What the collector finalizes is the rest of something else.
    gc.collect()
    gc.disable()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
    return list(passed)
