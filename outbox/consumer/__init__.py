"""The consumer's side: inbox row, handler and offset in one transaction."""
