"""The ``msprobe`` command: one file per sub-command, no logic in it. A file offers `add_arguments(parser)` and `run(args) -> int`."""
