"""Random numbers of torch: seeds, random calls, dropout, and a planted rounding unit."""
