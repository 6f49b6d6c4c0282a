"""The tables of compare."""
