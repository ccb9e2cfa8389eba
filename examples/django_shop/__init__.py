"""A shop on Django: an order and its message commit together, and the points for it are added exactly once."""
