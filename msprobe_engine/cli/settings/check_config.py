"""Check a settings file (probe.yaml, or the existing config.json and monitor_config.json) and print the tree it resolves to:
all values with the defaults filled in and the environment applied. Mistakes are printed one per line; remarks
are about keys that are accepted and have no effect."""

from __future__ import annotations

import argparse
import json
import os
import sys

EPILOG = """\
examples:
  msprobe settings check probe.yaml
  msprobe settings check monitor_config.json --json
  MSPROBE_CONFIG=probe.yaml msprobe settings check

exit codes: 0 the file is right, 2 it has mistakes or cannot be read"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``msprobe settings check``."""
    parser.add_argument("path", nargs="?", help="the settings file; without it the one that MSPROBE_CONFIG names")
    parser.add_argument("--kind", choices=("probe", "dump", "monitor"), help="kind of the file; default: recognised by its keys")
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Print the resolved settings, without passwords and keys in them: people show this to others."""
    import yaml

    from msprobe_engine.config.secrets.masking import mask_setting
    from msprobe_engine.core.errors import SettingsError
    from msprobe_engine.core.settings.load import read_settings
    from msprobe_engine.core.settings.tree import to_tree
    from msprobe_engine.probe.rules.build import build_rules

    settings, warnings = read_settings(args.path, kind=args.kind)
    for line in warnings:
        print(f"remark: {line}", file=sys.stderr)
    try:
        build_rules(settings)  # the arguments of rules are known to the rules alone
    except SettingsError as error:
        where = args.path or os.environ["MSPROBE_CONFIG"]
        raise SettingsError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from error
    tree = mask_setting("", to_tree(settings))
    print(json.dumps(tree, indent=2) if args.json else yaml.safe_dump(tree, sort_keys=False).rstrip())
    return 0
