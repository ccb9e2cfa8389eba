"""The producer's side: send, prepare, decide, and the decorators on top."""
