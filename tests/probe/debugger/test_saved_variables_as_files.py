"""Level debug with task tensor: saved variables and their gradients as files."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from debug_model import Net, config, x

from msprobe import dump
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]


def step(debugger: PrecisionDebugger) -> dict[str, torch.Tensor]:
    """A step with nested variables, a leaf, a parameter, one without a gradient; what the files should hold."""
    net, given = Net(), x().requires_grad_()
    h = net.a(given)
    debugger.save(h, "h")
    debugger.save({"a": [h, 1], "n": {}}, "nest")
    debugger.save(net.a.weight, "w")
    debugger.save([h * 2], "plain", save_backward=False)
    debugger.save(h + 1, "unused")
    debugger.save("text", "text")
    (h.square() * 3).sum().backward()
    debugger.step()
    grad = 6 * h.detach()
    assert net.a.weight.grad is not None
    return {
        "h.0.debug": h, "h_grad.0.debug": grad, "nest.0.debug.a.0": h, "nest_grad.0.debug.a.0": grad, "w.0.debug": net.a.weight,
        "w_grad.0.debug": net.a.weight.grad, "plain.0.debug.0": h * 2, "unused.0.debug": h + 1,
    }  # fmt: skip


def test_files(tmp_path: Path) -> None:
    """One file per tensor with the name that the record gives, equal bit by bit to what was saved, gradients too; nothing else."""
    debugger = PrecisionDebugger(config(tmp_path, "debug", "tensor", section={"summary_mode": "md5"}))
    expected = step(debugger)
    debugger.run.at_exit()
    (place,) = (tmp_path / "dump" / "step0").iterdir()
    files = {p.stem: torch.load(p, weights_only=True) for p in (place / "dump_tensor_data").iterdir()}
    assert sorted(files) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(files[name], tensor.detach()), name
    document = json.loads((place / "debug.json").read_text())
    assert document["dump_data_dir"] == str(place / "dump_tensor_data")
    named: list[str] = []

    def look(node: Any) -> None:
        if isinstance(node, dict) and "data_name" in node:
            named.append(node["data_name"].removesuffix(".pt"))
            assert len(node["md5"]) == 8
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            look(child)

    look(document["data"])
    assert sorted(named) == sorted(expected)


def test_packed(tmp_path: Path) -> None:
    """The packed format holds the same tensors."""
    debugger = PrecisionDebugger(config(tmp_path, "debug", "tensor", section={"tensor_format": "packed"}))
    expected = step(debugger)
    debugger.run.at_exit()
    (place,) = (tmp_path / "dump" / "step0").iterdir()
    assert not list((place / "dump_tensor_data").glob("*.pt"))
    entries = open_dump(tmp_path / "dump").load(0).entries
    found = [f"{name}{'.' if where else ''}{where}" for name, entry in entries.items() for where, t in entry.tensors() if t.data_name]
    assert sorted(found) == sorted(expected)


def test_a_name_that_is_no_file_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name with a slash is recorded; its tensor has no file, which is listed and counted in the last line."""
    debugger = PrecisionDebugger(config(tmp_path, "debug", "tensor"))
    debugger.save(x(), "a/b")
    debugger.save(x(), "c")
    debugger.step()
    debugger.run.at_exit()
    (place,) = (tmp_path / "dump" / "step0").iterdir()
    assert [p.name for p in (place / "dump_tensor_data").iterdir()] == ["c.0.debug.pt"]
    assert "a/b.0.debug" in (place / "not_saved.json").read_text()
    said = capsys.readouterr().err
    assert "msprobe ends, but not everything is there. 1 step (0)" in said
    assert "; lost: tensor names that cannot be file names 1\n" in said
    data = json.loads((place / "debug.json").read_text())["data"]
    assert "data_name" not in data["a/b.0.debug"]
    assert data["a/b.0.debug"]["Max"] == 1.0


def test_a_gradient_changed_in_place_later(tmp_path: Path) -> None:
    """What is saved is what was there at the call: changes of the variable or of the gradient behind it do not show."""
    debugger = PrecisionDebugger(config(tmp_path, "debug", "tensor"))
    h = (x() * 1).requires_grad_()
    debugger.save(h, "h")
    (h * 2).sum().backward()
    with torch.no_grad():
        h.zero_()
        h.grad.zero_()  # type: ignore[union-attr]
    debugger.step()
    debugger.run.at_exit()
    (place,) = (tmp_path / "dump" / "step0").glob("*/dump_tensor_data")
    assert torch.equal(torch.load(place / "h.0.debug.pt", weights_only=True), x())
    assert torch.equal(torch.load(place / "h_grad.0.debug.pt", weights_only=True), torch.full((2, 4), 2.0))


@pytest.mark.parametrize("form", ["files", "packed"])
def test_several_threads(tmp_path: Path, form: str) -> None:
    """Variables saved from four threads at once: each has its record and its file, with its own content, in every step."""
    debugger = PrecisionDebugger(config(tmp_path, "debug", "tensor", section={"tensor_format": form}))

    def work(who: int) -> None:
        for i in range(50):
            debugger.save(torch.full((4,), float(100 * who + i)), f"v{who}", save_backward=False)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(2):
            threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            debugger.step()
    finally:
        sys.setswitchinterval(before)
    debugger.run.at_exit()
    out = dump.read(tmp_path / "dump")
    for number in range(2):
        assert len(out[number]) == 200
        for who, i in itertools.product(range(4), range(50)):
            (tensor,) = out[number][f"v{who}.{i}.debug"].tensors.values()
            assert tensor.load()[0] == 100 * who + i
