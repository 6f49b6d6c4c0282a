"""Level debug with MindSpore: variables saved by hand, their gradients, debug.json and the files."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops
from small_cells import Job, config, steps, train, x

from msprobe.mindspore import PrecisionDebugger

pytestmark = pytest.mark.usefixtures("own_debugger")


def document(directory: Path, step: int = 0) -> dict[str, Any]:
    """debug.json as it is."""
    PrecisionDebugger._instance.run.files.wait()  # type: ignore[union-attr]
    (path,) = (directory / "dump" / f"step{step}").glob("*/debug.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_records_and_gradients(tmp_path: Path) -> None:
    """A record is the variable itself; a gradient is the whole one of the tensor, null where none comes; containers keep their shape."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))

    def program(value: Any) -> Any:
        h = value * 2
        debugger.save(h, "h")
        debugger.save({"a": [h, (1, 2.5)], "b": "s", "n": {}}, "nest")
        debugger.save(5, "five")
        debugger.save(h, "h", save_backward=False)
        debugger.save(np.arange(3.0), "array")
        return (h * 3).sum() + h.sum()

    mindspore.value_and_grad(program)(x())
    debugger.step()
    found = document(tmp_path)
    assert {k: found[k] for k in ("task", "level", "framework", "dump_data_dir")} == {
        "task": "statistics",
        "level": "debug",
        "framework": "mindspore",
        "dump_data_dir": None,
    }
    data = found["data"]
    assert list(data) == [
        *("h.0.debug", "h_grad.0.debug", "nest.0.debug", "nest_grad.0.debug", "five.0.debug", "five_grad.0.debug"),
        *("h.1.debug", "array.0.debug", "array_grad.0.debug"),
    ]
    assert data["h.0.debug"]["type"] == "mindspore.Tensor"
    assert data["h.0.debug"]["shape"] == [2, 4]
    assert data["h.0.debug"]["Max"] == 2.0
    assert (data["h_grad.0.debug"]["Max"], data["h_grad.0.debug"]["Min"]) == (4.0, 4.0)
    assert data["nest.0.debug"]["a"] == [data["h.0.debug"], [{"type": "int", "value": 1}, {"type": "float", "value": 2.5}]]
    assert data["nest_grad.0.debug"]["a"][0]["Max"] == 4.0
    assert data["nest_grad.0.debug"]["a"][1] == [None, None]
    assert data["five.0.debug"] == {"type": "int", "value": 5}
    assert data["array.0.debug"]["type"] == "numpy.ndarray"
    assert data["five_grad.0.debug"] is None


def test_the_training_keeps_its_bits(tmp_path: Path) -> None:
    """Saving activations, gradients and parameters inside the pass changes nothing."""
    plain = train(None)
    debugger = PrecisionDebugger(config(tmp_path, "debug", "tensor"))
    job = Job()
    inner = job.net.pair.construct

    def construct(a: Any, b: Any) -> Any:
        debugger.save([a, b], "in")
        out = inner(a, b)
        debugger.save(out, "out")
        return out

    object.__setattr__(job.net.pair, "construct", construct)
    for _ in range(2):
        debugger.start(job.net)
        loss = job.forward_backward()
        debugger.save(loss, "loss")
        debugger.save(list(job.gradients), "gradients", save_backward=False)
        debugger.stop()
        job.update()
        debugger.step()
    assert job.state() == plain
    data = document(tmp_path)["data"]
    assert data["out_grad.0.debug"]["Max"] == 1.0
    place = next((tmp_path / "dump").glob("step0/*/dump_tensor_data"))
    np.testing.assert_array_equal(np.load(place / "out_grad.0.debug.npy"), np.ones((2, 4), np.float32))
    assert np.load(place / "loss.0.debug.npy").tobytes() == job.losses[0]
    assert len(list(place.glob("gradients.0.debug.*.npy"))) == len(job.gradients)


def test_values_are_those_of_the_moment(tmp_path: Path) -> None:
    """A tensor that is written into afterwards is recorded and saved as it was."""
    debugger = PrecisionDebugger(config(tmp_path, "debug", "tensor"))
    tensor = Tensor(np.ones((3, 3), np.float32))
    debugger.save(tensor, "t")
    tensor[0] = 7.0
    ops.assign(mindspore.Parameter(tensor), tensor * 2)
    debugger.step()
    assert document(tmp_path)["data"]["t.0.debug"]["Max"] == 1.0
    (file,) = (tmp_path / "dump").glob("step0/*/dump_tensor_data/t.0.debug.npy")
    assert np.load(file).max() == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((x, ""), "name is ''; allowed: a text that is not empty"),
        ((x, 3), "name is 3"),
        ((None, "n"), "'n' is a NoneType; allowed: a tensor, number, string, numpy array, or a dict, list or tuple of them"),
        (({1, 2}, "n"), "'n' is a set"),
        ((1.5, "n", 1), "save_backward is 1; allowed: True or False"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[Any, ...], said: str) -> None:
    """A wrong call is left out with a warning that names it; the rest is written."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))
    debugger.save(*arguments)
    debugger.save(2, "good", False)
    debugger.step()
    assert said in capsys.readouterr().err
    assert list(document(tmp_path)["data"]) == ["good.0.debug"]


def test_other_levels_say_that_save_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At other levels save has no effect, and says so once."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    debugger.save(1, "n")
    debugger.save(1, "n")
    assert capsys.readouterr().err.count("PrecisionDebugger.save has no effect at level L0") == 1


def test_inside_of_compiled_code(tmp_path: Path) -> None:
    """save in a compiled function is left out of the graph: the function compiles and gives what it gave."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))

    @mindspore.jit  # type: ignore[untyped-decorator]
    def compiled(value: Any) -> Any:
        h = value * 2
        PrecisionDebugger.save(h, "h")
        return h.sum()

    assert float(mindspore.value_and_grad(compiled)(x() + 1)[0]) == 16.0
    debugger.save(1, "outside", False)
    debugger.step()
    assert list(document(tmp_path)["data"]) == ["outside.0.debug"]


def test_several_threads(tmp_path: Path) -> None:
    """Threads may save at the same time; every call has its record."""
    debugger = PrecisionDebugger(config(tmp_path, "debug"))
    threads = [threading.Thread(target=lambda: [debugger.save(x(), "t", False) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    debugger.step()
    assert len(document(tmp_path)["data"]) == 80
    assert steps(tmp_path) == [0]
