"""Prints the folders of tests whose slow tests a change may break: ``python tests/frameworks/touched.py BASE``.

A changed test folder is its own; a changed package of the product has the test folder of its name, or those of `PLACES`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PLACES = {
    "common": ("probe", "torch", "megatron"),
    "autoload": ("launch",),
    "monitor": ("monitor_torch", "monitor_rules", "monitor_faults", "monitor_modules", "monitor_analyze"),
    "megatron": ("megatron", "monitor_faults"),
    "transformers": ("integrations",),
    "accelerate": ("integrations",),
    "lightning": ("integrations",),
    "torchtitan": ("integrations",),
    "mindspeed": ("integrations",),
}
"""Package of the product -> folders of tests, where these have other names."""


def folders(changed: list[str]) -> list[str]:
    """Folders of tests for paths of changed files."""
    found: set[str] = set()
    for path in changed:
        parts = Path(path).parts
        if len(parts) < 2 or parts[0] not in ("tests", "msprobe_engine", "msprobe_integrations"):
            continue
        package = parts[1].removesuffix(".py")
        names = (package,) if parts[0] == "tests" else PLACES.get(package, (package,))
        found |= {name for name in names if (TESTS / name).is_dir()}
    return sorted(f"tests/{name}" for name in found if any((TESTS / name).rglob("test_*.py")) and name != "mindspore")


if __name__ == "__main__":
    if not sys.argv[1:] or not sys.argv[1]:
        sys.exit("touched.py needs the commit that the change began with: make test-touched BASE=COMMIT")
    said = subprocess.run(["git", "diff", "--name-only", sys.argv[1], "HEAD"], capture_output=True, text=True, check=True)
    print("\n".join(folders(said.stdout.split())))
