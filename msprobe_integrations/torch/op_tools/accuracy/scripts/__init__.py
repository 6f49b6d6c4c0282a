"""Scripts of single operators."""
