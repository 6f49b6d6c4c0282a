"""The life of a dump and its files."""
