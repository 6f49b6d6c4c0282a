"""Print the JSON Schema of probe.yaml: an editor that has it completes keys, shows what they mean, and marks mistakes while typing."""

from __future__ import annotations

import argparse
import json

EPILOG = """\
examples:
  msprobe settings schema > probe.schema.json

Then say so in the first line of probe.yaml (VS Code with the YAML extension, and every editor with yaml-language-server):
  # yaml-language-server: $schema=probe.schema.json

exit code: 0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command takes nothing."""
    parser.epilog = EPILOG


def run(_: argparse.Namespace) -> int:
    from msprobe_engine.core.settings.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
