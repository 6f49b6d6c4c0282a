"""Numbers, verdicts and files as the existing tool's graphs have them."""
