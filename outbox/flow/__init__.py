"""Flows over several services: sagas; try, confirm, cancel."""
