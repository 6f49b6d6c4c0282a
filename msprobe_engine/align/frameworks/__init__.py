"""Dumps of two frameworks: brought to common terms, so that what is written in other words is compared all the same."""
