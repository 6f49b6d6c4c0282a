"""Two runs of different layouts as two sides of the same shapes: a plan for each row (`planner`), then its execution (`global_tensors`)."""
