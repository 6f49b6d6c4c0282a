"""Settings files of the existing tool."""
