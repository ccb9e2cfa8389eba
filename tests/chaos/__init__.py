"""Chaos: both banks at work while their processes, connections and databases are killed, thousands of times."""
