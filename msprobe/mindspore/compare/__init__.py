"""Comparison functions of the existing tool, where its versions have them."""
