"""Communication of torch: which calls, over which groups, and when their outputs are there."""
