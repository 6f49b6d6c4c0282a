"""How much of a difference round-off explains: carried from record to record, and measured by calibration."""
