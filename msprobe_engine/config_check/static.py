"""Settings of a training from its launch scripts and settings files; nothing of them is ever run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msprobe_engine.config_check.found import Found, Launch, StaticSettings

__all__ = ["Found", "Launch", "StaticSettings", "collect_static"]


def collect_static(
    paths: Sequence[str | Path], environment: Mapping[str, str] | None = None, arguments: Sequence[str] | None = None
) -> StaticSettings:
    """Read launch scripts (``.sh``), Python argument files (``.py``, read as text), YAML, JSON and TOML files.

    Args:
        paths: the files; those that they name (sourced scripts, ``--deepspeed x.json``, ``--config_file``) are read too.
        environment: the variables the script would start with; None: not known, so a variable without a default in the script is not known.
        arguments: what would stand behind the script on its command line; None: not known.

    Raises:
        UsageError: `paths` is one text, not a list, or a path is no file of these kinds.
        DumpFormatError: a given file cannot be read.
    """
    raise NotImplementedError
