"""Define an operator's views and acts, once, for the console, the HTTP endpoints, the command line and Python."""
