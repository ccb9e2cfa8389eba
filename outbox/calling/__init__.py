"""Functions of the application that the framework calls: their declaration, their registry, and the calls."""
