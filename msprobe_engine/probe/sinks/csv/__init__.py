"""CSV files of the monitor."""
