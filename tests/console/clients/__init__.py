"""Programs of operators, each with a client that a generator made of the console's OpenAPI document."""
