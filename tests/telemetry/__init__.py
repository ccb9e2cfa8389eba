"""What the framework tells of itself."""
