"""Which calls and rows of two dumps belong together."""
