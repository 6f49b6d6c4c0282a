"""Task free_benchmark with MindSpore, see `msprobe_engine.accuracy.free_benchmark`."""
