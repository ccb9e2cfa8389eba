"""Many services' databases, reconciled as one: which pairs there are is found by patterns, and one run has bounds."""
