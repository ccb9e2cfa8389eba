"""The check of orphans: ask whether the local transaction of an undecided half committed, and decide."""
