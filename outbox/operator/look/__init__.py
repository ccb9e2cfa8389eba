"""What an operator sees: one filter, one row and one view for each noun."""
