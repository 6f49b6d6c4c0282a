"""Commands about what runs are started with."""
