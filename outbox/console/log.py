"""Log lines of the console: a constant word, and facts as JSON, so that nothing a caller sends can forge a line."""

from __future__ import annotations

import json
import logging
import traceback

logger = logging.getLogger("outbox.console")
logger.addHandler(logging.NullHandler())


def log(level: int, event: str, **facts: object) -> None:
    """Log an event with its facts: escaped to ASCII, and long texts cut."""
    if logger.isEnabledFor(level):
        cut = {name: value[:4000] if isinstance(value, str) else value for name, value in facts.items()}
        logger.log(level, "%s %s", event, json.dumps(cut, default=str), extra={"event": event})


def log_failure(error: BaseException, **facts: object) -> None:
    """Log an error that nobody expected; its traceback is one escaped text, the end of it if it is long."""
    text = "".join(traceback.format_exception(error))
    log(logging.ERROR, "console.failed", traceback=text[-4000:], **facts)
