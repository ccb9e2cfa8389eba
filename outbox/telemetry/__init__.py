"""How the framework speaks: events, records, hooks; OpenTelemetry and Prometheus are built on them.

::

    from outbox.telemetry.events import MessageParked
    from outbox.telemetry.hooks import add_hook

    def page_operator(event):
        if isinstance(event, MessageParked):
            pager.send(f"{event.group} parked {event.message_id}: {event.reason}")

    add_hook(page_operator)
"""
