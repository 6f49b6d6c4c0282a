"""Operators that are checked in a way of their own."""
