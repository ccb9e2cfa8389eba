"""Keep the record of reconciliations: written by a job, read by operators; and tell when the next one is due."""
