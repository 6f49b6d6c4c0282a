"""Variables of the environment: which are collected, and what they do to the numbers."""
