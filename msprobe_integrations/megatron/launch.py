"""Runs an unchanged training script with the probe attached."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from msprobe_engine.errors import ProbeError, UsageError

if TYPE_CHECKING:
    from msprobe_integrations.megatron.observer import TrainingObserver

FLAG = "--msprobe-config"
USAGE = f"""usage: python -m msprobe_integrations.megatron [-m] SCRIPT {FLAG} FILE [the script's own arguments]

Runs SCRIPT (with -m: the module of that name) with the probe of FILE attached. Under torchrun:

  torchrun --nproc_per_node 8 -m msprobe_integrations.megatron pretrain_gpt.py {FLAG} probe.yaml ...

{FLAG} may stand anywhere; it is taken off before a script with its own argument parser sees the command line, and is known to
Megatron's parser as args.msprobe_config. Without it the environment variable
MSPROBE_CONFIG counts. `msprobe check-config FILE` checks a file."""


def split(arguments: Sequence[str]) -> tuple[str, bool, list[str], str]:
    """(script, is a module, the script's arguments, settings file).

    Raises:
        UsageError: there is no script, or no settings file.
    """
    rest: list[str] = []
    config = ""
    items = iter(arguments)
    for item in items:
        if item == FLAG:
            config = next(items, "")
            if not config:
                raise UsageError(f"{FLAG} needs a file: {FLAG} probe.yaml")
        elif item.startswith(f"{FLAG}="):
            config = item.partition("=")[2]
        else:
            rest.append(item)
    is_module = bool(rest) and rest[0] == "-m"
    rest = rest[1:] if is_module else rest
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"no script given (seen: {' '.join(arguments) or 'nothing'})\n{USAGE}")
    config = config or os.environ.get("MSPROBE_CONFIG", "")
    if not config:
        raise UsageError(f"no settings file: add {FLAG} FILE, or set MSPROBE_CONFIG")
    return rest[0], is_module, rest[1:], config


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns an exit code only when the script was not run."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        script, is_module, rest, config = split(arguments)
        if not is_module and not os.path.isfile(script):
            raise UsageError(f"script '{script}' does not exist (working directory {os.getcwd()})")
        prepare(config)
    except ProbeError as error:
        print(f"msprobe: {error}", file=sys.stderr)
        return 2
    return run(script, is_module, rest)


def prepare(config: str) -> None:
    """Read the settings and put the post-import hooks in place.

    Raises:
        SettingsError: the settings are wrong; said before the training starts.
    """
    from msprobe_engine.settings.load import load_settings
    from msprobe_integrations.megatron import patches

    settings = load_settings(config)
    patches.flag_value = config
    file = os.path.abspath(config)  # the script may go elsewhere

    def make() -> TrainingObserver:
        from msprobe_integrations.megatron.observer import TrainingObserver

        return TrainingObserver(settings, file=file)

    patches.observe(make)


def run(script: str, is_module: bool, rest: list[str]) -> NoReturn:
    """Run the script as ``python SCRIPT`` would."""
    from msprobe_integrations.megatron import patches

    sys.argv = [script, *rest]
    try:
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
    finally:
        observer = patches.made()
        if observer is not None:
            observer.close()
    sys.exit(0)
