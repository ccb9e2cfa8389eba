"""``outbox half``: undecided halves are found, shown with their history, checked, reset and decided."""
