"""Call the application for what is parked, in the database in which that happened."""
