"""What changes a message, a group, a topic: the rows of acts, and their changes; under everything that acts."""
