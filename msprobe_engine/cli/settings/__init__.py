"""Work with settings files: check one, and the JSON Schema for editors."""

from __future__ import annotations

from msprobe_engine.cli.main import Command

COMMANDS = {
    "check": Command("settings.check_config", "check a settings file and print what it resolves to"),
    "schema": Command("settings.schema", "print the JSON Schema of probe.yaml, for editors"),
}
EXAMPLES = """\
examples:
  msprobe settings check probe.yaml
  msprobe settings schema > probe.schema.json"""
