"""Take messages of a broker in; by a worker, or in a loop of the application's."""
