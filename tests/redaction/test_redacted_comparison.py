"""Dumps and packs whose ids were left out: one key tells same from other, no key or another one tells nothing, and never "the same"."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm

from msprobe_engine.cli.main import main
from msprobe_engine.core.process.user_key import KEY

pytestmark = pytest.mark.framework
PROGRAM = """
import ending, json, os, sys, torch
from pathlib import Path
from torch import nn
from msprobe.core.config_check import ConfigChecker
from msprobe.pytorch import PrecisionDebugger
root, runs, modes = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]

class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.words, self.head = nn.Embedding(5000, 4), nn.Linear(4, 2)
        if name not in ("seen", "words"):
            nn.init.ones_(self.words.weight)  # so that nothing but the ids differs
    def forward(self, ids, prompt):
        return self.head(self.words(ids) * 0)

def dump(mode, name, key, shift):
    os.environ["MSPROBE_KEY"] = key
    out = root / mode / name
    out.mkdir(parents=True)
    settings = {"task": "statistics", "level": "L0", "dump_path": str(out), "statistics": {"summary_mode": mode}, "redact": ["tokens"]}
    (out / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    model = Model(name)
    if mode == "digest":
        checker = ConfigChecker(model, None, str(out / "pack.zip"))
    debugger = PrecisionDebugger(str(out / "config.json"))
    debugger.start(model)
    ids = torch.arange(100, 2148).roll(shift) + (2000 if shift < 0 else 0)  # the same mean and norm for shifts of 0 and more
    model(ids, "a prompt").sum().backward()
    debugger.stop()
    debugger.step()

for mode in modes:
    for run in runs[:3] if mode == "md5" else runs:
        assert ending.fork(lambda: dump(mode, *run)) == 0
"""
ONE, OTHER = "the first key, made by chance", "another key, made by chance"
MODES = ("statistics", "md5", "digest")
RUNS = (
    ("a", ONE, 0),
    ("same", ONE, 0),
    ("other ids", ONE, 3),
    ("far ids", ONE, -1),
    ("words", ONE, 0),
    ("seen", ONE, -1),  # other ids, and an embedding that tells them apart
    ("other key", OTHER, 0),
    ("no key", "", 0),
)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``{mode}/{name}/step0/...`` of all runs."""
    assert KEY == "MSPROBE_KEY"
    root = tmp_path_factory.mktemp("runs")
    made = warm.run(PROGRAM, str(root), json.dumps(RUNS), *MODES, env={**os.environ, "MSPROBE_REDACT": "tokens"})
    assert made.returncode == 0, made.stderr[-3000:]
    return root


COMPARED = [
    *((mode, "same", 0) for mode in MODES[1:]),
    *((mode, "other ids", 1) for mode in MODES[1:]),
    ("digest", "far ids", 1),
    *((mode, name, 3) for mode in ("statistics", "digest") for name in ("other key", "no key")),
    ("statistics", "same", 3),
    ("statistics", "seen", 1),
    *(("statistics", name, 3) for name in ("other ids", "far ids")),
]


@pytest.mark.parametrize("command", ["compare", "diagnose"])
def test_dumps(command: str, dumps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit codes of both commands; what cannot be compared is counted, and nobody says that all numbers are the same."""
    faults = []
    for mode, name, expected in COMPARED:
        target, golden = (str(next((dumps / mode / one).glob("step0/*/dump.json"))) for one in (name, "words" if name == "seen" else "a"))
        words = ["-tp", target, "-gp", golden] if command == "compare" else [target, golden]
        code = main([command, *words, "-o", str(tmp_path / mode / name)])
        said = "".join(capfd.readouterr())
        right = code == expected
        if name == "seen" and command == "diagnose":  # the words differ, and nobody knows whether the ids do
            right &= "what goes in is the same" not in said
            right &= "redacted, and whether they are the same is not known" in said
        if expected == 3:
            right &= "redacted values" in said and "All numbers are the same" not in said
        faults += [] if right else [(mode, name, code, said)]
    assert not faults, faults


def test_packs(dumps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A difference of inputs is found with one key; another key is said and is no difference."""
    for name, equal in (("same", True), ("other ids", False), ("other key", None), ("no key", None)):
        packs = [str(dumps / "digest" / one / "pack.zip") for one in ("a", name)]
        code = main(["config_check", "-c", *packs, "-o", str(tmp_path / name)])
        text = "".join(capfd.readouterr()) + "".join(path.read_text() for path in (tmp_path / name).rglob("*.json"))
        assert ("the same samples in another order" in text) == (equal is False), (name, text)
        assert ("values are redacted" in text) == (equal is None), (name, text)
        assert equal is not None or code != 0, name
