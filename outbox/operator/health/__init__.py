"""The health of an outbox: its numbers, what is wrong, and what mends it.

The rules are declared in `rules`, the numbers in `stats`. The doctor (`examine`) applies all rules to one database. The
overview applies those on messages and workers to all registered databases.
"""
