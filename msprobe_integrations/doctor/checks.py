"""The table of checks, the most valuable first. It imports no framework: the program that starts the checks reads it."""

from __future__ import annotations

from msprobe_engine.workflow.doctor import Check

_HERE = "msprobe_integrations.doctor"

CHECKS = (Check("H", "environment", 20.0, f"{_HERE}.environment"),)
"""All of them."""
