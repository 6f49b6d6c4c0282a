"""Files of a monitored run, read; and the trend data base."""
