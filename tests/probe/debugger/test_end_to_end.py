"""`PrecisionDebugger` end to end on a tiny GPT."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch
import warm
from torch import nn

from msprobe_engine.core.errors import SettingsError, UsageError
from msprobe_engine.formats.dump.notebook.step_dump import StepDump
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = pytest.mark.framework


@pytest.fixture(autouse=True)
def _no_debugger() -> Any:
    PrecisionDebugger._instance = None
    yield
    PrecisionDebugger._instance = None


def train(config: Path, steps: int = 2, **options: Any) -> dict[str, Any]:
    """Train with the debugger around every step; `options` go to its constructor."""
    debugger = PrecisionDebugger(str(config), **options)
    job = pr.gpt.Job(pr.TINY)
    losses = []
    for _ in range(steps):
        debugger.start(job.model)
        losses.append(job.step())
        debugger.stop()
        debugger.step()
    debugger.writer.close()
    return pr.state(job.model, losses)


def only(tmp_path: Path, step: int = 0) -> StepDump:
    """The one rank of a step."""
    return open_dump(tmp_path / "dump").load(step)


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_levels(tmp_path: Path, level: str) -> None:
    """Each level writes modules, APIs or both, forward and backward, with parameter gradients at module levels, and stacks."""
    pr.run(train, pr.write_config(tmp_path, level), directory=tmp_path)
    dump = open_dump(tmp_path / "dump")
    assert dump.steps == [0, 1]
    step = dump.load(1)
    assert step.complete
    names = list(step.entries)
    modules, apis = [n for n in names if n.startswith("Module.")], [n for n in names if not n.startswith("Module.")]
    assert bool(modules) == (level != "L1")
    assert bool(apis) == (level != "L0")
    if level != "L1":
        assert "Module.blocks.1.mlp.fc2.Linear.backward.0" in names
        assert set(step.entries["Module.blocks.1.mlp.fc2.Linear.parameters_grad.0"].sections) == {"weight", "bias"}
        assert step.entries["Module.blocks.1.mlp.fc2.Linear.forward.0"].parent == "Module.blocks.1.mlp.Mlp.forward.0"
    if level != "L0":
        assert {"Functional.cross_entropy.0.forward", "Functional.cross_entropy.0.backward"} <= set(names)
    assert any("gpt.py" in line for line in next(e.stack for e in step.entries.values() if e.stack))


@pytest.mark.parametrize(("steps", "expected"), [([], [0, 1, 2, 3, 4]), ([1, "3-4"], [1, 3, 4]), (["2-3"], [2, 3])])
def test_step_window(tmp_path: Path, steps: list[Any], expected: list[int]) -> None:
    """Only listed steps are written, ranges included."""
    pr.run(train, pr.write_config(tmp_path, "L0", step=steps), 5, directory=tmp_path)
    assert open_dump(tmp_path / "dump").steps == expected


def test_rank_window_of_two(tmp_path: Path) -> None:
    """On two gloo ranks every listed rank writes its directory; others write nothing and say nothing; the first listed one tells."""
    said = pr.run(train, pr.write_config(tmp_path / "all", "mix"), ranks=2, directory=tmp_path)
    assert open_dump(tmp_path / "all/dump").ranks(0) == [0, 1]
    assert said[0].lines("[rank 0]", "turned on")
    assert not said[1].lines("turned on")
    said = pr.run(train, pr.write_config(tmp_path / "one", "mix", rank=[1]), ranks=2, directory=tmp_path)
    assert open_dump(tmp_path / "one/dump").ranks(0) == [1]
    assert said[1].lines("[rank 1]", "turned on")
    assert not said[0].log


def late_group(config: Path, box: Path) -> None:
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ[f"X_{key}"] = os.environ.pop(key)
    debugger = PrecisionDebugger(str(config))
    job = pr.gpt.Job(pr.TINY)
    for step in range(3):
        if step == 2:
            os.environ.update({key[2:]: value for key, value in os.environ.items() if key.startswith("X_")})
            pr.start_group(box)
        debugger.start(job.model)
        job.step()
        debugger.stop()
        debugger.step()
    debugger.writer.close()


def test_group_comes_up_late(tmp_path: Path) -> None:
    """Steps before the process group are kept per process; when it is there their directories get the name of the rank."""
    pr.run(late_group, pr.write_config(tmp_path, "L0"), tmp_path, ranks=2, group=False, directory=tmp_path)
    dump = open_dump(tmp_path / "dump")
    assert [dump.ranks(s) for s in dump.steps] == [[0, 1]] * 3
    assert all(dump.load(s, r).complete for s in dump.steps for r in dump.ranks(s))


def several_windows(config: Path) -> None:
    debugger = PrecisionDebugger(str(config))
    debugger.set_init_step(7)
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    x = torch.ones(2, 4)
    for _ in range(2):
        PrecisionDebugger.start(net)
        y = net["a"](x)
        PrecisionDebugger.stop()
        y = net["b"](y)
        PrecisionDebugger.start(net)
        z = net["a"](y)
        PrecisionDebugger.stop()
        z.sum().backward()
        PrecisionDebugger.step()
    debugger.writer.close()


def test_several_windows_in_a_step(tmp_path: Path) -> None:
    """start/stop may come several times per step; what is between is not seen, gradients after stop are, and numbering goes on."""
    pr.run(several_windows, pr.write_config(tmp_path, "L0"), directory=tmp_path)
    dump = open_dump(tmp_path / "dump")
    assert dump.steps == [7, 8]
    names = list(dump.load(8).entries)
    assert sorted(n for n in names if n != "Module.b.Linear.parameters_grad.0") == [
        "Module.a.Linear.backward.0",
        "Module.a.Linear.backward.1",
        "Module.a.Linear.forward.0",
        "Module.a.Linear.forward.1",
        "Module.a.Linear.parameters_grad.0",
    ]


def list_of_models(config: Path) -> None:
    debugger = PrecisionDebugger(str(config))
    nets = [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))]
    debugger.start(nets)
    nets[1](nets[0](torch.ones(1, 4))).sum().backward()
    debugger.stop()
    debugger.step()
    debugger.writer.close()


def test_list_of_models(tmp_path: Path) -> None:
    """With a list of models the index comes first in the path."""
    pr.run(list_of_models, pr.write_config(tmp_path, "L0"), directory=tmp_path)
    assert {"Module.0.0.Linear.forward.0", "Module.1.0.Linear.backward.0"} <= set(only(tmp_path).entries)


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"list": ["fc1"]}, lambda n: "fc1" in n),
        ({"data_mode": ["forward"]}, lambda n: ".forward." in n),
        ({"scope": ["Module.blocks.0.ln1.LayerNorm.forward.0", "Module.blocks.0.mlp.fc1.Linear.forward.0"]}, lambda n: ".blocks.0." in n),
    ],
)
def test_filters(tmp_path: Path, keys: dict[str, Any], kept: Any) -> None:
    """scope, list and data_mode leave out what they name."""
    pr.run(train, pr.write_config(tmp_path, "L0", **keys), 1, directory=tmp_path)
    names = list(only(tmp_path).entries)
    assert names
    assert all(kept(n) or ("parameters_grad" in n and keys == {"data_mode": ["forward"]}) for n in names), names


def test_data_mode_input(tmp_path: Path) -> None:
    """data_mode input leaves outputs out."""
    pr.run(train, pr.write_config(tmp_path, "L1", data_mode=["input"]), 1, directory=tmp_path)
    step = only(tmp_path)
    assert step.entries
    assert all("output" not in e.sections for e in step.entries.values())


SCRIPT = """
import sys, torch
sys.path.insert(0, {here!r})
import probe_ranks as pr
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
debugger = PrecisionDebugger({config!r})
job = pr.gpt.Job(pr.TINY)
for step in range(2):
    debugger.start(job.model)
    job.step()
    if step == 1:
        {end}
    debugger.stop()
    debugger.step()
"""


def script(config: Path, end: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, which ends as `end` says in the middle of its second step."""
    text = textwrap.dedent(SCRIPT).format(here=str(Path(__file__).parents[1]), config=str(config), end=end)
    return warm.run(text, timeout=240)


@pytest.mark.parametrize(
    ("end", "code", "complete"),
    [
        ("raise RuntimeError('the training broke')", 1, False),
        ("sys.exit(0)", 0, False),
        ("debugger.stop(); sys.exit(0)", 0, True),
    ],
)
def test_end_without_step(tmp_path: Path, end: str, code: int, complete: bool) -> None:
    """A job that ends in the middle of a step, by an exception or without stop, still writes it, marked as not complete; the
    exception is the training's own."""
    ran = script(pr.write_config(tmp_path, "mix"), end)
    assert ran.returncode == code, ran.stderr
    assert ("the training broke" in ran.stderr) == (code == 1)
    assert only(tmp_path, 0).complete
    cut = only(tmp_path, 1)
    assert cut.complete == complete
    assert "Functional.cross_entropy.0.forward" in cut.entries


def test_end_without_a_word(tmp_path: Path) -> None:
    """os._exit runs no handler: steps that were ended are whole, the open one is marked as not complete."""
    ran = script(pr.write_config(tmp_path, "mix"), "import os; os._exit(5)")
    assert ran.returncode == 5, ran.stderr
    assert only(tmp_path, 0).complete
    assert "Functional.cross_entropy.0.forward" in only(tmp_path, 0).entries
    assert not only(tmp_path, 1).complete


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((4,), float(i)) * 2


def with_workers(config: Path) -> list[float]:
    debugger = PrecisionDebugger(str(config))
    net = nn.Sequential(nn.Linear(4, 4))
    seen = []
    debugger.start(net)
    for batch in torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2):
        seen.append(net(batch).sum().item())
        debugger.stop()
        debugger.step()
        debugger.start(net)
    debugger.stop()
    debugger.writer.close()
    return seen


def test_forked_workers(tmp_path: Path) -> None:
    """Workers of a DataLoader that are forked inside the window see nothing and write nothing."""
    done = pr.run(with_workers, pr.write_config(tmp_path, "mix"), directory=tmp_path)
    assert len(done[0].value) == 2
    dump = open_dump(tmp_path / "dump")
    assert all(len(dump.ranks(s)) == 1 for s in dump.steps)
    assert sum("mul" in n for n in dump.load(0).entries) == 0
    assert "Module.0.Linear.forward.0" in dump.load(1).entries


def second(config: Path) -> bool:
    first = PrecisionDebugger(str(config))
    return PrecisionDebugger(str(config)) is first and PrecisionDebugger() is first


def test_second_construction(tmp_path: Path) -> None:
    """A second construction gives the first object and says so."""
    done = pr.run(second, pr.write_config(tmp_path, "L1"), directory=tmp_path)[0]
    assert done.value
    assert len(done.lines("not used")) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "L7"}, "L7"),
        ({"task": "statistic"}, "statistics"),
        ({"step": ["5-"]}, "5-"),
        ({"rank": [-1]}, "-1"),
        ({"dump_path": 3}, "dump_path"),
        ({"config_path": "no/such/config.json"}, "config.json"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    """A wrong argument is named in the error, and a right construction works afterwards."""
    config = pr.write_config(tmp_path, "L1")
    with pytest.raises((SettingsError, UsageError), match=message):
        PrecisionDebugger(**{"config_path": str(config), **arguments})
    assert PrecisionDebugger(str(config)).dump.level == "L1"


def test_calls_in_the_wrong_order(tmp_path: Path) -> None:
    """start before construction, start without a model at L0, a model that is none, a negative step: each says what to do."""
    with pytest.raises(UsageError, match="construct it first"):
        PrecisionDebugger.start()
    debugger = PrecisionDebugger(str(pr.write_config(tmp_path, "L0")))
    with pytest.raises(UsageError, match=r"needs the model"):
        debugger.start()
    with pytest.raises(UsageError, match=r"allowed: torch\.nn\.Module"):
        debugger.start("model")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="-1"):
        debugger.set_init_step(-1)


def idle(config: Path) -> None:
    debugger = PrecisionDebugger(str(config))
    for _ in range(2):
        debugger.start(nn.Sequential(nn.Linear(2, 2)))
        debugger.stop()
        debugger.step()
    debugger.writer.close()


def test_nothing_captured(tmp_path: Path) -> None:
    """A step in which nothing was seen is said, with what to look at."""
    done = pr.run(idle, pr.write_config(tmp_path, "L0"), directory=tmp_path)[0]
    assert done.lines("step 0: nothing was captured", "start()")


def test_digest(tmp_path: Path) -> None:
    """summary_mode digest puts a digest at every tensor, equal for equal runs."""
    for name in ("a", "b"):
        pr.run(train, pr.write_config(tmp_path / name, "L0", summary_mode="digest"), 1, directory=tmp_path)
    digests = []
    for name in ("a", "b"):
        entry = open_dump(tmp_path / name / "dump").load(0).entries["Module.norm.LayerNorm.forward.0"]
        digests.append([t.digest for t in entry.sections["output"]])
    assert digests[0] == digests[1]
    assert all(digests[0])
