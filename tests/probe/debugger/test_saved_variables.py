"""Level debug: `PrecisionDebugger.save`, debug.json and the gradients in it."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import probe_ranks as pr
import pytest
import torch
from debug_model import Net, config, steps, written, x
from torch import nn

from msprobe.pytorch import save
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]


def document(directory: Path, step: int = 0) -> dict[str, Any]:
    """debug.json as it is."""
    debugger = PrecisionDebugger._instance
    assert debugger is not None
    debugger.run.files.wait()
    debugger.run.started.close()
    (path,) = (directory / "dump" / f"step{step}").glob("*/debug.json")
    first = not any((directory / "dump" / f"step{before}").exists() for before in range(step))
    pack = ["config_check_pack.zip"] * first
    assert sorted(p.name for p in path.parent.iterdir()) == [*pack, "debug.json"], "nothing beside debug.json but the pack"
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_format(tmp_path: Path) -> None:
    """A record is the described variable itself; gradients have null until they come, nested containers keep their shape, numbers
    count per name."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))
    net, given = Net(), x().requires_grad_()
    h = net.a(given)
    debugger.save(h, "h")
    debugger.save({"a": [h, (1, 2.5)], "b": "s", "n": {}}, "nest")
    debugger.save(5, "five")
    debugger.save(True, "flag")
    save(h, "h", save_backward=False)
    debugger.save(h * 1, "unused")
    (h * 3).sum().backward()
    debugger.step()
    found = document(tmp_path)
    assert {k: found[k] for k in ("task", "level", "framework", "dump_data_dir")} == {
        "task": "statistics",
        "level": "debug",
        "framework": "pytorch",
        "dump_data_dir": None,
    }
    data = found["data"]
    assert list(data) == [
        "h.0.debug",
        "h_grad.0.debug",
        "nest.0.debug",
        "nest_grad.0.debug",
        "five.0.debug",
        "five_grad.0.debug",
        "flag.0.debug",
        "flag_grad.0.debug",
        "h.1.debug",
        "unused.0.debug",
        "unused_grad.0.debug",
    ]
    assert data["h.0.debug"]["shape"] == [2, 4]
    assert data["h.0.debug"]["Max"] == pytest.approx(h.max().item())
    assert (data["h_grad.0.debug"]["Max"], data["h_grad.0.debug"]["Min"]) == (3.0, 3.0)
    assert data["nest.0.debug"]["a"][0] == data["h.0.debug"]
    assert data["nest.0.debug"]["a"][1] == [{"type": "int", "value": 1}, {"type": "float", "value": 2.5}]
    assert data["nest_grad.0.debug"]["a"][0]["Max"] == 3.0
    assert data["nest_grad.0.debug"]["a"][1] == [None, None]
    assert (data["nest_grad.0.debug"]["b"], data["nest_grad.0.debug"]["n"]) == (None, {})
    assert data["five.0.debug"] == {"type": "int", "value": 5}
    assert data["flag.0.debug"] == {"type": "bool", "value": True}
    assert data["five_grad.0.debug"] is data["flag_grad.0.debug"] is data["unused_grad.0.debug"] is None


def test_a_variable_named_as_a_gradient(tmp_path: Path) -> None:
    """A variable "h_grad" beside a variable "h": every record keeps its own name and value."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))
    h = x().requires_grad_()
    debugger.save(h, "h")
    debugger.save(5, "h_grad")
    debugger.save(h, "h")
    (h * 3).sum().backward()
    debugger.step()
    data = document(tmp_path)["data"]
    assert list(data) == ["h.0.debug", "h_grad.0.debug", "h_grad.1.debug", "h_grad_grad.1.debug", "h.2.debug", "h_grad.2.debug"]
    assert data["h_grad.1.debug"]["value"] == 5
    assert data["h_grad.0.debug"]["Max"] == data["h_grad.2.debug"]["Max"] == 3


def test_gradients_that_come_late_twice_or_not(tmp_path: Path) -> None:
    """The last of several backward passes counts, leaves and parameters have gradients too, tensors without one have null, and
    what comes after the step is not taken."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))
    net, given = Net(), x().requires_grad_()
    h = net.a(given)
    debugger.save([h, given, net.a.weight, x(), torch.arange(3), h.detach()], "all")
    with torch.no_grad():
        debugger.save(net.a.bias, "bias")
    h.sum().backward(retain_graph=True)
    (h * 5).sum().backward(retain_graph=True)
    debugger.step()
    (h * 7).sum().backward()
    debugger.step()
    data = document(tmp_path)["data"]
    gradients = data["all_grad.0.debug"]
    assert gradients[0]["Max"] == 5.0
    assert gradients[1]["shape"] == [2, 4]
    assert gradients[2]["shape"] == [4, 4]
    assert gradients[3:] == [None, None, None]
    assert data["bias_grad.0.debug"]["Max"] == 10.0
    assert steps(tmp_path) == [0]


def test_hooks_are_gone_after_the_step(tmp_path: Path) -> None:
    """The hook on a parameter stays for one step only, whatever `save` is called with."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))
    weight = Net().a.weight
    for _ in range(3):
        debugger.save(weight, "w")
        assert len(weight._backward_hooks or {}) == 1
        debugger.step()
        assert not weight._backward_hooks


def train(config: Path | None) -> dict[str, Any]:
    """Three steps with dropout, values saved everywhere on the way."""
    debugger = PrecisionDebugger(str(config)) if config else None
    job = pr.gpt.Job(pr.TINY)
    dropout = nn.Dropout(0.3)
    losses = []
    for _ in range(3):
        loss = job.forward()
        if debugger:
            debugger.save(list(job.model.parameters()), "parameters")
            debugger.save({"loss": loss}, "loss")
        shared = dropout(job.model.tokens.weight)
        if debugger:
            debugger.save(shared, "shared")
        (loss + shared.square().mean() + (shared * 0.5).sum() * 1e-3).backward()
        job.update()
        losses.append(loss.detach())
        if debugger:
            debugger.step()
    return pr.state(job.model, losses)


def test_the_training_keeps_its_bits(tmp_path: Path) -> None:
    """Losses, weights and random streams are the same, bit by bit, with and without saved variables and their gradient hooks."""
    plain = pr.run(train, None, directory=tmp_path)[0].value
    assert pr.run(train, config(tmp_path, "debug"), directory=tmp_path)[0].value == plain
    assert open_dump(tmp_path / "dump").steps == [0, 1, 2]


@pytest.mark.parametrize(("variable", "name", "backward", "says"), [
    (None, "n", True, "'n' is a NoneType; allowed: a tensor"),
    ({1, 2}, "s", True, "'s' is a set; allowed"),
    (object(), "o", True, "'o' is a object; allowed"),
    (1, 3, True, "name is 3; allowed: a text"),
    (1, "", True, "name is ''; allowed: a text"),
    (1, "b", "yes", "save_backward is 'yes'; allowed: True or False"),
])  # fmt: skip
def test_what_cannot_be_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], variable: Any, name: Any, backward: Any, says: str
) -> None:
    """An unsupported variable or name is left out with one warning that names it, however often it comes; the rest is written."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))
    for _ in range(3):
        debugger.save(variable, name, backward)
    debugger.save(1.5, "good")
    debugger.step()
    assert capsys.readouterr().err.count(says) == 1
    assert list(document(tmp_path)["data"]) == ["good.0.debug", "good_grad.0.debug"]


def test_odd_contents(tmp_path: Path) -> None:
    """Arrays are described; what a container holds besides tensors, numbers and texts is written as its type; keys of a dict may be
    anything; a name may have any character."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))
    debugger.save(np.ones((2, 3)), "array")
    debugger.save({3: None, "s": {1}, "o": OrderedDict(k=x())}, "odd")
    debugger.save(2, "a name/with é")
    debugger.step()
    data = document(tmp_path)["data"]
    assert (data["array.0.debug"]["type"], data["array.0.debug"]["Mean"]) == ("numpy.ndarray", 1.0)
    assert data["odd.0.debug"]["3"] is None
    assert data["odd.0.debug"]["o"]["k"]["shape"] == [2, 4]
    assert data["odd_grad.0.debug"] == {"3": None, "s": [None], "o": {"k": None}}
    assert data["a name/with é.0.debug"]["value"] == 2


def test_step_and_rank_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only listed steps are written, start and stop change nothing, the end is said; a rank that is not this one writes nothing."""
    debugger = PrecisionDebugger(config(tmp_path, "debug", step=[1, "3-4"]))
    for step in range(6):
        debugger.start()
        debugger.save(step, "number")
        debugger.stop()
        debugger.save(step, "number")
        debugger.step()
    assert steps(tmp_path) == [1, 3, 4]
    assert list(document(tmp_path, 3)["data"]) == [f"number{g}.{n}.debug" for n in (0, 1) for g in ("", "_grad")]
    said = capsys.readouterr().err
    assert "msprobe ends successfully. 3 steps (1, 3-4), 12 records" in said
    assert "debug.json is at" in said


def ranks(config: Path) -> None:
    debugger = PrecisionDebugger(str(config))
    debugger.save(torch.distributed.get_rank(), "rank")
    debugger.step()
    debugger.writer.close()


def test_rank_window(tmp_path: Path) -> None:
    """On two gloo ranks only the listed one writes its directory, and the other one says nothing about that."""
    said = pr.run(ranks, config(tmp_path, "debug", rank=[1]), ranks=2, directory=tmp_path)
    assert open_dump(tmp_path / "dump").ranks(0) == [1]
    assert not said[0].log


def test_other_levels_and_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a level other than debug, and in task structure, save does nothing and says so once."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    for _ in range(2):
        debugger.save(1, "one")
    assert capsys.readouterr().err.count("PrecisionDebugger.save has no effect at level L0; set level to 'debug'") == 1
    PrecisionDebugger._instance = None
    debugger = PrecisionDebugger(config(tmp_path, "debug", "structure"))
    for _ in range(2):
        debugger.save(1, "one")
    assert capsys.readouterr().err.count("save has no effect in task structure") == 1
    debugger.step()
    assert steps(tmp_path) == []


def test_level_debug_captures_nothing_else(tmp_path: Path) -> None:
    """start at level debug needs no model and puts no hook on the one it gets; without a save there is no directory."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))
    net = Net()
    debugger.start()
    debugger.start(net)
    net(x()).sum().backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    debugger.stop()
    debugger.step()
    assert steps(tmp_path) == []


def test_existing_reader_rule(tmp_path: Path) -> None:
    """Our reader takes the records as saved variables, by name and number."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))
    debugger.save({"k": [x()]}, "v")
    debugger.step()
    entries = written(tmp_path).entries
    assert [place for place, _ in entries["v.0.debug"].tensors()] == ["k.0"]


def compiled(path: Path) -> None:
    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # a framework that was imported before may have switched compilation off
    torch._dynamo.config.disable = False
    debugger = PrecisionDebugger(str(path))

    def f(v: torch.Tensor) -> torch.Tensor:
        PrecisionDebugger.save(v, "inside")
        return v * 2

    for _ in range(2):
        y = torch.compile(f, backend="eager", fullgraph=True)(torch.ones(3))
        PrecisionDebugger.save(y, "outside")
        debugger.step()
    debugger.run.at_exit()


def test_compiled_code(tmp_path: Path) -> None:
    """Inside torch.compile nothing is saved, because that would split the graph; this is said once with the names."""
    done = pr.run(compiled, config(tmp_path, "debug"), directory=tmp_path)[0]
    assert len(done.lines("save has no effect inside torch.compile: inside")) == 1
    assert list(open_dump(tmp_path / "dump").load(1).entries) == ["outside.0.debug", "outside_grad.0.debug"]
