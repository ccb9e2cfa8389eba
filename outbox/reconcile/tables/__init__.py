"""Tables that aren't ours, compared as ours are: what a job says of them, and how PostgreSQL and Spark read them."""
