"""A dump as Python objects."""
