"""Reconcile without an end: follow the log pass by pass, and tell of differences and of their ends."""
