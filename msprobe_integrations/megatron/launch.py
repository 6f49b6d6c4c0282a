"""Runs an unchanged training script with the probe attached, also where no interpreter of the environment loads it by itself."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from msprobe_engine.core.errors import ProbeError, UsageError
from msprobe_integrations import autoload
from msprobe_integrations.autoload import request
from msprobe_integrations.megatron.flags import CONFIG, Flags, parse_flags, request_probe

USAGE = f"""usage: python -m msprobe_integrations.megatron [-m] SCRIPT {CONFIG} FILE [the script's own arguments]

Runs SCRIPT (with -m: the module of that name) with the probe of FILE attached. Under torchrun:

  torchrun --nproc_per_node 8 -m msprobe_integrations.megatron pretrain_gpt.py {CONFIG} probe.yaml ...

{CONFIG} may stand anywhere, and so may --msprobe-output-dir DIR, --msprobe-set KEY=VALUE and --msprobe-strict; they are taken off before
a script with its own argument parser sees the command line, and Megatron's parser knows them. Without {CONFIG} the environment variable
MSPROBE_CONFIG counts. `msprobe settings check FILE` checks a file."""


def split_command_line(arguments: Sequence[str]) -> tuple[str, bool, list[str], Flags]:
    """(script, is a module, the script's arguments, the probe's arguments).

    Raises:
        UsageError: there is no script, or an argument lacks its value.
    """
    flags, rest = parse_flags(arguments)
    is_module = bool(rest) and rest[0] == "-m"
    rest = rest[1:] if is_module else rest
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"no script given (seen: {' '.join(arguments) or 'nothing'})\n{USAGE}")
    return rest[0], is_module, rest[1:], flags


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns an exit code only when the script was not run."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        script, is_module, rest, flags = split_command_line(arguments)
        if not is_module and not os.path.isfile(script):
            raise UsageError(f"script '{script}' does not exist (working directory {os.getcwd()})")
        prepare(flags)
    except ProbeError as error:
        print(f"msprobe: {error}", file=sys.stderr)
        return 2
    return run(script, is_module, rest)


def prepare(flags: Flags) -> None:
    """Check the settings and wait for Megatron, as an interpreter that loads the probe by itself does.

    Raises:
        UsageError: there is no settings file.
        SettingsError: the settings are wrong; said before the training starts.
    """
    asked = request_probe(flags)
    if asked is None:
        raise UsageError(f"no settings file: add {CONFIG} FILE, or set MSPROBE_CONFIG")
    asked.settings()
    request.request_probe(asked.config, asked.changes, by=asked.by)  # the script may change the environment
    autoload.install()


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
        observer = patches.get_observer()
        if observer is not None:
            observer.close()
    sys.exit(0)
