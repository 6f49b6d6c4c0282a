"""Task free_benchmark with torch, see `msprobe_engine.accuracy.free_benchmark`."""
