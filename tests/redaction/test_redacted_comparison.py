"""Dumps and packs whose ids were left out: one key tells same from other, no key or another one tells nothing, and never "the same"."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_engine.core.user_key import KEY

pytestmark = pytest.mark.framework
PROGRAM = """
import json, os, sys, torch
from pathlib import Path
from torch import nn
from msprobe.core.config_check import ConfigChecker
from msprobe.pytorch import PrecisionDebugger
root, name, shift = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5000, 4), nn.Linear(4, 2)
        if name not in ("seen", "words"):
            nn.init.ones_(self.words.weight)  # so that nothing but the ids differs
    def forward(self, ids, prompt):
        return self.head(self.words(ids) * 0)

for mode in sys.argv[4:]:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    out = root / mode / name
    out.mkdir(parents=True)
    settings = {"task": "statistics", "level": "L0", "dump_path": str(out), "statistics": {"summary_mode": mode}, "redact": ["tokens"]}
    (out / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    model = Model()
    checker = ConfigChecker(model, None, str(out / "pack.zip"))
    debugger = PrecisionDebugger(str(out / "config.json"))
    debugger.start(model)
    ids = torch.arange(100, 2148).roll(shift) + (2000 if shift < 0 else 0)  # the same mean and norm for shifts of 0 and more
    model(ids, "a prompt").sum().backward()
    debugger.stop()
    debugger.step()
    sys.exit()
"""
ONE, OTHER = "the first key, made by chance", "another key, made by chance"
MODES = ("statistics", "md5", "digest")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``{mode}/{name}/step0/...``: two equal runs, two with other ids, two with other ids that the embedding tells apart, one with another
    key, one without."""
    root = tmp_path_factory.mktemp("runs")
    for name, key, shift in (
        ("a", ONE, 0),
        ("same", ONE, 0),
        ("other ids", ONE, 3),
        ("far ids", ONE, -1),
        ("words", ONE, 0),
        ("seen", ONE, -1),
        ("other key", OTHER, 0),
        ("no key", "", 0),
    ):
        environment = {**os.environ, KEY: key, "MSPROBE_REDACT": "tokens"}
        command = [sys.executable, "-c", PROGRAM, str(root), name, str(shift), *MODES]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    return root


def msprobe(*arguments: object) -> tuple[int, str]:
    run = subprocess.run([sys.executable, "-m", "msprobe", *map(str, arguments)], capture_output=True, text=True, check=False)
    return run.returncode, run.stdout + run.stderr


def step(dumps: Path, mode: str, name: str) -> Path:
    (found,) = (dumps / mode / name).glob("step0/*/dump.json")
    return found


COMPARED = [
    *((mode, "same", {0}) for mode in MODES[1:]),
    *((mode, name, {1}) for mode in MODES[1:] for name in ("other ids", "far ids")),
    *((mode, name, {3}) for mode in MODES for name in ("other key", "no key")),
    ("statistics", "same", {3}),
    ("statistics", "seen", {1}),
    *(("statistics", name, {3}) for name in ("other ids", "far ids")),
]


@pytest.mark.parametrize(("mode", "name", "codes"), COMPARED)
@pytest.mark.parametrize("command", ["compare", "diagnose"])
def test_dumps(command: str, mode: str, name: str, codes: set[int], dumps: Path, tmp_path: Path) -> None:
    """Exit codes of both commands; what cannot be compared is counted, and nobody says that all numbers are the same."""
    target, golden = step(dumps, mode, name), step(dumps, mode, "words" if name == "seen" else "a")
    if command == "compare":
        code, said = msprobe("compare", "-tp", target, "-gp", golden, "-o", tmp_path)
    else:
        code, said = msprobe("diagnose", target, golden, "-o", tmp_path)
    assert code in codes, said
    if name == "seen" and command == "diagnose":  # the words differ, and nobody knows whether the ids do
        assert "what goes in is the same" not in said
        assert "redacted, and whether they are the same is not known" in said
    if codes == {3}:
        assert "redacted values" in said
        assert "All numbers are the same" not in said


@pytest.mark.parametrize(("name", "equal"), [("same", True), ("other ids", False), ("other key", None), ("no key", None)])
def test_packs(name: str, equal: bool | None, dumps: Path, tmp_path: Path) -> None:
    """A difference of inputs is found with one key; another key is said and is no difference."""
    code, said = msprobe("config_check", "-c", dumps / "digest" / "a" / "pack.zip", dumps / "digest" / name / "pack.zip", "-o", tmp_path)
    text = said + "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert ("the same samples in another order" in text) == (equal is False), said
    assert ("values are redacted" in text) == (equal is None), said
    assert equal is not None or code != 0
