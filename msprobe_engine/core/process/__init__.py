"""Which process of which launch this is."""
