"""RocketMQ's clients at our server: a raw client of our own wire table, and the official ones."""
