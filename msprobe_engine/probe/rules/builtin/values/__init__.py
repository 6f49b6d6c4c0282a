"""Numbers of any tensor or scalar."""
