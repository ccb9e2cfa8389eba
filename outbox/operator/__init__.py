"""What an operator sees and does, once, for the console, the HTTP endpoints, the command line and Python."""
