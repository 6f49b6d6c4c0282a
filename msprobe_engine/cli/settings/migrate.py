"""Write a config.json or monitor_config.json of the existing tool (8.1.1, 26.2.0) as probe.yaml: the same settings under the keys of this
project, those at their defaults left out. The file goes on working as it is; probe.yaml has more that can be set."""

from __future__ import annotations

import argparse
import sys

EPILOG = """\
examples:
  msprobe settings migrate config.json                          to the standard output
  msprobe settings migrate monitor_config.json -o probe.yaml

exit codes:
  0  the YAML means what the file means
  2  the file has mistakes, cannot be read, or the output cannot be written
  3  written, but keys named on the standard error have no effect or another meaning here"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``msprobe settings migrate``."""
    parser.add_argument("path", metavar="FILE", help="the settings file of the existing tool")
    parser.add_argument("-o", "--output", metavar="YAML", help="what to write; default: the standard output")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.add_argument("--kind", choices=("dump", "monitor"), help="config.json or monitor_config.json; default: recognised by its keys")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Write the YAML, and say what is not in it."""
    import os

    import yaml

    from msprobe_engine.cli.exit_codes import DONE, UNREADABLE
    from msprobe_engine.cli.options.outputs import refuse_overwriting, write_settings_file
    from msprobe_engine.core.log import one_line
    from msprobe_engine.core.settings.existing.migrate import migrate

    refuse_overwriting([("-o", args.output)], [args.path])
    result = migrate(args.path, args.kind)
    head = f"# from {one_line(os.path.basename(args.path))}; all other keys have their defaults: docs/reference/settings.md\n"
    text = head + yaml.safe_dump(result.tree, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    for word, lines in (("no counterpart", result.without_counterpart), ("note", result.notes)):
        for line in lines:
            print(one_line(f"{word}: {line}"), file=sys.stderr)
    if args.output in (None, "-"):
        print(text, end="")
    else:
        write_settings_file(args.output, text, force=args.force)
        print(f"{one_line(args.output)}: written. Next: msprobe settings check {one_line(args.output)}")
    return UNREADABLE if result.without_counterpart else DONE
