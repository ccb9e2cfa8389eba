"""``manage.py outbox`` and ``manage.py outbox_run``."""
