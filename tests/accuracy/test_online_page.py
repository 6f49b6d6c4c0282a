"""docs/online-accuracy.md: its settings and programs run as they stand, and the summary is what the page says; a wrong kernel of the
training's device is found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_online_precheck import CLI, free_port, until

from msprobe_engine.accuracy.settings import load_precheck_settings
from msprobe_engine.settings.load import load_settings

pytestmark = pytest.mark.framework
PAGE = (Path(__file__).parents[2] / "docs" / "online-accuracy.md").read_text(encoding="utf-8")
OFFLINE = (Path(__file__).parents[2] / "docs" / "operator-accuracy.md").read_text(encoding="utf-8")
CUSTOM = """
import torch
import my_kernels
from msprobe.pytorch import PrecisionDebugger

debugger = PrecisionDebugger("config.json")
model = torch.nn.Linear(16, 16)
for _ in range(2):
    debugger.start(model)
    my_kernels.rms_norm(0.1 * model(torch.randn(8, 16)).detach(), torch.ones(16))
    debugger.stop()
    debugger.step()
"""


def blocks(language: str, page: str = PAGE) -> list[str]:
    """The examples in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def both_sides(directory: Path, command: str) -> str:
    """Run the benchmark host by a command of the page and ``train.py``; what the host said. It finds an error."""
    server, client = (json.loads(block) for block in blocks("json")[:2])
    server["run_ut"]["port"] = client["tensor"]["port"] = free_port()
    (directory / "server.json").write_text(json.dumps(server))
    (directory / "config.json").write_text(json.dumps(client))
    words = command.split()
    assert words[0] == "msprobe"
    log = directory / "bench.log"
    with log.open("w") as file:
        bench = subprocess.Popen([*CLI, *words[1:], "-n", "1"], cwd=directory, stdout=file, stderr=file)
    until(lambda: "waiting for trainings" in log.read_text())
    subprocess.run([sys.executable, "train.py"], cwd=directory, check=True, capture_output=True)
    assert bench.wait(120) == 1
    return log.read_text()


def test_the_example(tmp_path: Path) -> None:
    """Both sides of the first example, with a device whose gelu is wrong: it is the one that does not pass, and the files are there."""
    for code in blocks("python"):
        (tmp_path / code.partition("\n")[0].removeprefix("# ")).write_text(code)
    said = both_sides(tmp_path, blocks("bash")[0])
    for line in blocks("text")[0].splitlines():
        assert re.sub(r"[0-9.e+]{4,}.*", "", line) in said  # numbers of another processor are others
    for step in (0, 1):
        assert len(list((tmp_path / f"output/step{step}").glob("accuracy_checking_*_rank0.csv"))) == 2
    assert not (tmp_path / "output/online_spool").exists()


def test_operators_of_ones_own(tmp_path: Path) -> None:
    """What `register_operator` says on the benchmark host holds for calls of a training: the wrong epsilon of the offline page is found."""
    for code in blocks("python", OFFLINE)[1:]:
        (tmp_path / code.partition("\n")[0].removeprefix("# ")).write_text(code)
    (tmp_path / "train.py").write_text(CUSTOM)
    (command,) = (block for block in blocks("bash") if "--operators" in block)
    said = both_sides(tmp_path, command)
    assert "step0/my_kernels.rms_norm.0: forward error" in said
    assert "step1/my_kernels.rms_norm.0: forward error" in said


def test_settings_of_the_page() -> None:
    """Every settings example is accepted, and every key in the table is one."""
    for block in blocks("json"):
        node = json.loads(block)
        (load_precheck_settings if "run_ut" in node else load_settings)(node)
    for keys in re.findall(r"^\| (`[^|]+) \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE):
        for key in re.findall(r"`(\w+)`", keys):
            assert hasattr(load_precheck_settings(None)[0], key), key


def test_commands_of_the_page() -> None:
    """The other commands of the page have the flags that it names."""
    for block in blocks("bash")[1:]:
        for line in block.splitlines():
            words = line.split()
            helped = subprocess.run([*CLI, *words[1 : 3 if words[1] == "certs" else 2], "--help"], capture_output=True, text=True)
            assert helped.returncode == 0, line
            for flag in (word for word in words if word.startswith("-")):
                assert flag in helped.stdout
