"""Flows over several services: sagas."""
