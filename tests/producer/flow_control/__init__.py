"""Flow control: producers are refused while too much of a topic waits, and nothing else ever is."""
