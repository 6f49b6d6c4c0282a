"""Run a launch line (torchrun, deepspeed, accelerate, a shell script, python) with the probe in every training process it starts.

The launch line stays as it is, and so do its exit code and its signals: this command becomes the launcher. Processes that import none of
the supported frameworks are left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from msprobe_engine.errors import UsageError

EXAMPLES = """\
examples:
  msprobe run --config probe.yaml -- torchrun --nproc_per_node 8 train.py --lr 1e-4
  msprobe run --config probe.yaml -- bash pretrain_llama.sh
  msprobe run --config probe.yaml --set monitor.activations=true --output-dir runs/today -- python train.py
  msprobe run --config probe.yaml --dry-run -- deepspeed train.py        print the environment, start nothing"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define what the command takes."""
    parser.usage = "msprobe run --config FILE [--set KEY=VALUE ...] [--output-dir DIR] [--dry-run] -- COMMAND ..."
    parser.epilog = f"{EXAMPLES}\n\n{parser.epilog}"
    parser.add_argument("-c", "--config", metavar="FILE", help="settings file; without it the one that MSPROBE_CONFIG names")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of the file; the value is YAML; may be repeated"
    )
    parser.add_argument("--output-dir", metavar="DIR", help="the same as --set output_dir=DIR")
    parser.add_argument("--dry-run", action="store_true", help="check the settings, print what would be started and its environment")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the launch line, after --")


def run(args: argparse.Namespace) -> int:
    """Become the launch line; the exit code (0) is that of ``--dry-run``.

    Raises:
        UsageError: there is no launch line, or its program does not exist.
        SettingsError: the settings are wrong; said before anything starts.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("no launch line: msprobe run --config probe.yaml -- torchrun --nproc_per_node 8 train.py")
    environment = prepared(args.config, [*args.set, *([f"output_dir={args.output_dir}"] if args.output_dir else [])])
    program, *rest = _program(command)
    if args.dry_run:
        for name in ("MSPROBE_CONFIG", "MSPROBE_SET", "PYTHONPATH"):
            if name in environment:
                print(f"{name}={environment[name]!r}")
        print(" ".join([program, *rest]))
    else:
        sys.stdout.flush()
        os.execve(program, [program, *rest], environment)
    return 0


def prepared(config: str | None, changes: list[str]) -> dict[str, str]:
    """The environment in which interpreters load the probe.

    Args:
        config: settings file, None: that of ``MSPROBE_CONFIG``.
        changes: ``key=value`` each.

    Raises:
        SettingsError, UsageError: the settings are wrong, or there are none.
    """
    from msprobe_engine.settings.load import load_settings

    config = config or os.environ.get("MSPROBE_CONFIG", "")
    if not config:
        raise UsageError("no settings file: add --config FILE, or set MSPROBE_CONFIG")
    load_settings(config, changes=changes)
    spec = importlib.util.find_spec("msprobe_integrations.autoload")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("the package msprobe_integrations is not installed beside this command; install msprobe anew")
    bootstrap = str(Path(next(iter(spec.submodule_search_locations))).resolve() / "bootstrap")
    before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != bootstrap]
    environment = {**os.environ, "MSPROBE_CONFIG": os.path.abspath(config), "PYTHONPATH": os.pathsep.join([bootstrap, *before])}
    environment.pop("MSPROBE_AUTOLOAD", None)
    environment.pop("MSPROBE_SET", None)
    if changes:
        environment["MSPROBE_SET"] = "\n".join(changes)
    return environment


def _program(command: list[str]) -> list[str]:
    """The command with the path of its program; a Python script that cannot be executed runs in this interpreter."""
    found = shutil.which(command[0])
    if found is not None:
        return [found, *command[1:]]
    if command[0].endswith(".py") and Path(command[0]).is_file():
        return [sys.executable, *command]
    raise UsageError(f"program '{command[0]}' was not found; give the launch line as you would type it, after --")
