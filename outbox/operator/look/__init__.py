"""Show an operator the system: one filter, one row and one view for each noun."""
