"""Statistics rows: their words, their columns, digests, and the kernel of the host."""
