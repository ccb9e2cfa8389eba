"""What a reconciliation writes down: runs, findings, settled ranges."""
