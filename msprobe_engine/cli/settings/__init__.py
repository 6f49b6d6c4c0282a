"""Work with settings files: check one, migrate one of the existing tool, and the JSON Schema for editors."""

from __future__ import annotations

from msprobe_engine.cli.main import Command

COMMANDS = {
    "check": Command("settings.check_config", "check a settings file and print what it resolves to"),
    "migrate": Command("settings.migrate", "write a settings file of the existing tool as probe.yaml"),
    "schema": Command("settings.schema", "print the JSON Schema of probe.yaml, for editors"),
}
EXAMPLES = """\
examples:
  msprobe settings check probe.yaml
  msprobe settings migrate config.json -o probe.yaml
  msprobe settings schema > probe.schema.json"""
