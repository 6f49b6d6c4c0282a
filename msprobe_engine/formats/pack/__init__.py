"""Packs of configurations, as far as it needs no framework to know them."""
