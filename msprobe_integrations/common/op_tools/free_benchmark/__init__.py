"""Task free_benchmark, see `msprobe_engine.accuracy.free_benchmark`: what torch and MindSpore have in common."""
