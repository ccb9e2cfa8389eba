"""Django finds its commands in a package of this name."""
