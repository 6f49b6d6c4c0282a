"""One sub-package per training framework. Each builds on `msprobe_engine` and imports its framework lazily."""
