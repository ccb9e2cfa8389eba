"""What the producer learns of its messages, and does about it."""
