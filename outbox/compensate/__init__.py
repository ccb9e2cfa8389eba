"""Roll a local transaction back after its commit, by a function that the service registered: once per message."""
