"""Names of the existing tool."""
