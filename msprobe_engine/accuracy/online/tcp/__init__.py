"""Messages over a connection."""
