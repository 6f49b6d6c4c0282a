"""Tools for single operators: pre-check and free benchmark."""
