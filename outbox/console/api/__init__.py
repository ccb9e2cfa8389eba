"""The HTTP endpoints: what `outbox.operator` does, as JSON under ``/api/v1``."""
