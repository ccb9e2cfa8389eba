"""Applications of web frameworks, each served as it is in production."""
