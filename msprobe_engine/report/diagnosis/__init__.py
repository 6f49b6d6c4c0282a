"""A diagnosis as a page."""
