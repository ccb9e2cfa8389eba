"""Measures: what the business tables of both sides must agree on."""
