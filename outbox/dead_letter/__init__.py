"""Call the application for parked messages and halves, in the database in which they were parked."""
