"""Two launches have written into one output directory, or below one dump_path: every command answers of the last one alone."""

from __future__ import annotations

import base64
import contextlib
import gzip
import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from msprobe.pytorch import TorchProbe
from msprobe_engine.cli.main import main
from msprobe_engine.core.log import set_rank

pytestmark = pytest.mark.framework
SETTINGS = """\
output_dir: {place}
monitor: {{gradients: true, activations: true}}
dump: {{step: [0, 1, 2], level: mix}}
sinks: {{csv: {{enabled: true}}}}
rules: recommended
"""
BELOW_DUMP_PATH = """\
output_dir: {place}_else
dump: {{step: [0, 1, 2], level: mix, dump_path: {place}}}
"""
FIRST, LAST = "layer_of_the_first", "layer_of_the_last"
COMMANDS = {
    "show": ["show", "{run}"],
    "show --json": ["show", "{run}", "--json"],
    "diagnose": ["diagnose", "{run}", "-o", "out"],
    "diagnose two": ["diagnose", "{run}", "{golden}", "-o", "out"],
    "nan_analyze": ["nan_analyze", "-i", "{run}", "-o", "out"],
    "trends": ["trends", "{run}", "-o", "out"],
    "trends two": ["trends", "{run}", "{golden}", "-o", "out"],
    "compare": ["compare", "{run}", "{golden}", "-o", "out"],
    "graph": ["graph", "{run}", "-o", "out"],
    "monitor report": ["monitor", "report", "{run}", "-o", "out"],
    "monitor analyze": ["monitor", "analyze", "{run}", "-o", "out"],
    "config_check": ["config_check", "{run}", "{golden}", "-o", "out"],
    "data2db": ["data2db", "--db", "out", "--data", "{run}"],
    "acc_check": ["acc_check", "{run}", "-o", "out"],
    "estimate": ["estimate", "{run}"],
}
PACKED = re.compile(r">([A-Za-z0-9+/]{40,}={0,2})<")


def launch(place: Path, name: str, steps: int, bad: int, text: str = SETTINGS) -> None:
    """A training whose only layer has this name; its input is NaN in step `bad`."""
    settings = place.parent / f"{name}.yaml"
    settings.write_text(text.format(place=place))
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe.from_config(str(settings))
    probe.attach(model, optimizer)
    for step in range(steps):
        probe.begin_step(step)
        optimizer.zero_grad()
        model[name](torch.full((2, 4), float("nan") if step == bad else 1.0)).square().mean().backward()
        optimizer.step()
        probe.end_step()
    probe.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run directory of two launches, of which the first has NaN and a step more, and a golden one of a single launch."""
    root = tmp_path_factory.mktemp("two_launches")
    launch(root / "run", FIRST, 3, 1)
    launch(root / "run", LAST, 2, -1)
    launch(root / "golden", LAST, 2, -1)
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def dump_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As `place`, below a dump_path: the first launch was of 3 ranks, of which the last one had NaN, the other one is of one rank."""
    root = tmp_path_factory.mktemp("dump_path")
    with pytest.MonkeyPatch.context() as patch:
        for run, name, steps, bad, rank, world in (("run", FIRST, 3, 1, 2, 3), ("run", LAST, 2, -1, 0, 1), ("golden", LAST, 2, -1, 0, 1)):
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(world))
            launch(root / run, name, steps, bad, BELOW_DUMP_PATH)
    set_rank(None)  # of later messages of this process
    yield root
    shutil.rmtree(root)


def written(directory: Path) -> str:
    """The text of all files in a directory: of pages also their data, of data bases their rows."""
    found = []
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        if file.suffix == ".db":
            with contextlib.closing(sqlite3.connect(file)) as base:
                found += list(base.iterdump())
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        found.append(text)
        for packed in PACKED.findall(text):
            data = base64.b64decode(packed)
            found.append(gzip.decompress(data).decode(errors="replace") if data[:2] == b"\x1f\x8b" else "")
    return "\n".join(found)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_last_launch_alone_is_in_the_answer(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main([word.format(run=place / "run", golden=place / "golden") for word in COMMANDS[name]])
    printed = capsys.readouterr()
    said = printed.out + printed.err
    answer = said + written(tmp_path)
    assert code in (0, 2 if name == "acc_check" else 0, 3), said
    assert FIRST not in answer
    assert not re.search(r"NaN or Inf: step|First NaN|steps 0 to 2|step ?2\b|step1-nan_inf|\b[1-9]\d* alerts|\"alerts\": [1-9]", said), said


def test_the_earlier_launch_is_a_run_of_its_own(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it dumped is kept, and is read where it was moved to."""
    assert main(["diagnose", str(place / "run" / "earlier-1"), "-o", str(tmp_path)]) == 1
    assert "8 NaN already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["show", "show --why", "diagnose", "diagnose two", "nan_analyze", "trends", "trends two", "compare", "graph", "data2db"]
)
def test_below_a_dump_path_the_last_launch_alone_is_read(
    name: str, dump_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of the first one stay where the existing tool's users expect them; that they are not read is said, with exit code 3."""
    monkeypatch.chdir(tmp_path)
    run, golden = dump_path / "run", dump_path / "golden"
    words = COMMANDS.get(name, ["show", "{run}", "--why", LAST])
    code = main([word.format(run=run, golden=golden) for word in words])
    printed = capsys.readouterr()
    answer = printed.out + printed.err + written(tmp_path)
    assert code == 3, answer[:4000]
    assert FIRST not in answer
    assert f"{run}: of an earlier run in this directory, and not read: steps 2" in answer
    assert f"{run}, step 0: of an earlier run in this directory, and not read: rank2" in answer
