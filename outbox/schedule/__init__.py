"""Schedules: at each time of a recurrence one message, over all workers."""
