"""Delivery: the producer learns what became of its messages, and acts on it."""
