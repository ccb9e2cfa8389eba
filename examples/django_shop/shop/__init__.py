"""The shop: one application, which is its project too."""
