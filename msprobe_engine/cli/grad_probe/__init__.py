"""What the gradient probe has written, afterwards."""

from __future__ import annotations

from msprobe_engine.cli.main import Command

COMMANDS = {
    "compare": Command("grad_probe.compare", "compare the gradient directions of two runs, step by step"),
}

EXAMPLES = """\
examples:
  msprobe grad_probe compare run_a/grad run_b/grad -o out
  msprobe grad_probe compare --help"""
