"""The command groups of what an operator sees: messages, halves, inboxes, dead letters, bulk jobs, the audit, groups.

Each has a list, some an export, and the acts that can be done to what it lists (`outbox.cli.groups`).
"""

from outbox.cli.nouns.bulk import audit_app as audit_app
from outbox.cli.nouns.bulk import bulk_app as bulk_app
from outbox.cli.nouns.groups import group_app as group_app
from outbox.cli.nouns.halves import half_app as half_app
from outbox.cli.nouns.inboxes import dead_app as dead_app
from outbox.cli.nouns.inboxes import inbox_app as inbox_app
from outbox.cli.nouns.messages import messages_app as messages_app
