"""Which records are dumped."""
