"""A bug that is found on Friday: billing reads again what it had since Monday, and knows what it said before."""
