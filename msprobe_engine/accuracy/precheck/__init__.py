"""Pre-check of a dump: its calls, the processes that check them, result files and summary."""
