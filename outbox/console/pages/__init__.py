"""The pages: HTML made on the server, over `outbox.operator`. Everything works without JavaScript."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.console.pages.routes import page_routes

if TYPE_CHECKING:
    from outbox.console.pages.view import View

__all__ = ["View", "page_routes"]
