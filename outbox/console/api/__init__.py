"""The HTTP endpoints: what `outbox.operator` does, as JSON under ``/api/v1``."""

from __future__ import annotations

from outbox.console.api import acts, lists, probes

#: Fixed paths come before those that have an id at the same level.
ROUTERS = (lists.router, acts.router, probes.document)
