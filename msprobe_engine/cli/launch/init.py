"""Write a settings file to begin with: the commented YAML of a preset, for ``msprobe run --config FILE``."""

from __future__ import annotations

import argparse
import os
import sys

EPILOG = """\
examples:
  msprobe init                           probe.yaml of preset watch
  msprobe init --preset dump dump.yaml
  msprobe init --preset nan -            to the standard output

exit codes: 0 written, 2 the file is there already (see --force) or cannot be written"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``msprobe init``."""
    parser.add_argument(
        "file", nargs="?", default="probe.yaml", metavar="FILE", help="what to write (probe.yaml); - is the standard output"
    )
    parser.add_argument("--preset", choices=("watch", "nan", "dump"), default="watch", help="what is watched, as of msprobe run (watch)")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Write the file.

    Raises:
        UsageError: it is there already, has another kind of name, or cannot be written.
    """
    from msprobe_engine.cli.options.outputs import write_settings_file
    from msprobe_engine.core.log import one_line
    from msprobe_engine.core.settings.presets import PRESETS, preset_file

    text = preset_file(args.preset).read_text(encoding="utf-8")
    if args.file == "-":
        sys.stdout.write(text)
        return 0
    shown = one_line(args.file)
    text = text.replace("probe.yaml", os.path.basename(args.file))
    write_settings_file(args.file, text, force=args.force)
    print(f"{shown}: preset {args.preset}, {PRESETS[args.preset]}. Next: msprobe run --config {shown} -- torchrun train.py")
    return 0
