"""A comparison of packs as text, tables and a page."""
