"""The reconciliation on Spark: finds a Java, opens a quiet session, runs the tasks where the executors are."""
