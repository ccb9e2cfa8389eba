"""What a message is: its nouns, its codec, its limits, its ids."""
