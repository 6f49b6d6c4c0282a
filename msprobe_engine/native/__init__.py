"""The C modules. Each has a twin in Python that gives the same result where it was not built."""
