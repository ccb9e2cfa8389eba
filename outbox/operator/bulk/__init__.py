"""Bulk jobs: one act on many messages, carried out by workers, with an outcome for each."""
