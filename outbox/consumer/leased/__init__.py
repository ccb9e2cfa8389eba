"""Messages that clients take under a lease and settle one by one, wherever they handle them."""
