"""Framework-independent part of msprobe: settings, records, pipeline, sinks, rules, dump files, diagnosis, command line."""

__version__ = "0.1.0"
