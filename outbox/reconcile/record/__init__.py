"""What is recorded of reconciliations: written by a job, read by operators, and when the next one is due."""
