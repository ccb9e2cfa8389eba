"""Handle messages outside of transactions: queues leased by commits, and many handlers at a time."""
