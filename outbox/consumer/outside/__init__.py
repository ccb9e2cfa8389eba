"""Handle messages outside of transactions: queues claimed by commits, and many handlers at a time."""
