"""Messages over a directory that both hosts have."""
