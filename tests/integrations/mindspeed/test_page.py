"""docs/frameworks/mindspeed.md, the arguments of docs/frameworks/megatron.md that it leads to, and examples/mindspeed say what works."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from msprobe_engine.core.settings.load import load_settings
from msprobe_integrations.megatron import flags

ROOT = Path(__file__).parents[3]
PAGE, MEGATRON = ((ROOT / "docs" / "frameworks" / name).read_text(encoding="utf-8") for name in ("mindspeed.md", "megatron.md"))
EXAMPLES = ROOT / "examples" / "mindspeed"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda file: file.name)
def test_scripts(script: Path) -> None:
    """A launch script is correct bash, asks for the probe by a flag that the parsers know, and hands further arguments on."""
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=240)
    text = script.read_text(encoding="utf-8")
    assert flags.parse_flags(re.findall(r"--msprobe-\S+ \S+", text)[-1].split())[0].config
    assert '"$@"' in text


def test_settings(tmp_path: Path) -> None:
    """The settings file of the examples, and every one on the page, are accepted."""
    found = [*re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE), (EXAMPLES / "probe.yaml").read_text(encoding="utf-8")]
    assert len(found) == 3
    for number, text in enumerate(found):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        assert load_settings(file).output_dir == yaml.safe_load(text)["output_dir"]


def test_arguments() -> None:
    """The page of Megatron has the arguments that the parsers know, all of them."""
    import argparse

    parser = flags.add(argparse.ArgumentParser(add_help=False))
    known = {option for action in parser._actions for option in action.option_strings}
    assert set(re.findall(r"^\| `(--msprobe-[a-z-]+)", MEGATRON, re.MULTILINE)) == known
