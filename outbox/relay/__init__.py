"""Relays: groups whose handler publishes a topic's messages to a broker or an endpoint; one module for each kind."""
