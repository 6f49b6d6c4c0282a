"""`PrecisionDebugger` and the life of a dump with torch."""
