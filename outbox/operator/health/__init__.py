"""Examine the health of an outbox: its numbers, its faults, and their mends.

The rules are declared in `rules`, the numbers in `stats`. The doctor (`examine`) applies all rules to one database. The
overview applies those on messages and workers to all registered databases.
"""
