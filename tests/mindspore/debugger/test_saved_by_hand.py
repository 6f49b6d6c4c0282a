"""Tensors saved by hand: level debug, ``save`` and ``save_grad`` in compiled code, `SingleSave`."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import mindspore
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from small_cells import Job, config, steps, train, x

from msprobe.core import SingleComparator, SingleSave
from msprobe.mindspore import PrecisionDebugger
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.mindspore.graph.single import save, save_grad


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


def test_tensors_of_a_loop(tmp_path: Path) -> None:
    """Tensors, lists and dicts of them by key, step and micro step, bfloat16 as float32; other values are left out; two runs compare."""
    for run in ("a", "b"):
        SingleSave._instance = None
        SingleSave(tmp_path / run, fmk="mindspore")
        low = mindspore.Tensor([[1.5, -2.0]], mindspore.bfloat16)
        SingleSave.save({"prompt": mindspore.Tensor([1, 2, 3], mindspore.int32), "no": 3})
        SingleSave.save({"prompt": mindspore.Tensor([4]), "logits": [low, {"x": mindspore.Parameter(mindspore.Tensor([0.5]))}]})
        SingleSave.step()
        SingleSave.save_ex({"prompt": mindspore.Tensor(True)}, 7)
        SingleSave.save_config({"lr": 0.1})
    place = tmp_path / "a" / "data"
    assert np.load(place / "prompt/step0/rank0/micro_step1/prompt.npy").tolist() == [4]
    saved = np.load(place / "logits/step0/rank0/micro_step0/logits.0.npy")
    assert (saved.dtype, saved.tolist()) == (np.float32, [[1.5, -2.0]])
    assert np.load(place / "logits/step0/rank0/micro_step0/logits.1.x.npy").tolist() == [0.5]
    facts = json.loads((place / "logits/step0/rank0/micro_step0/logits.json").read_text())["data"]
    assert facts[0] == {"max": 1.5, "min": -2.0, "mean": -0.25, "norm": 2.5, "shape": [1, 2]}
    assert (place / "prompt/step1/rank0/micro_step7/prompt.npy").exists()
    assert not (place / "no").exists()
    SingleComparator.compare(tmp_path / "a", tmp_path / "b", tmp_path / "result", file_format="csv")
    assert (tmp_path / "result" / "prompt.csv").exists()


X = Tensor(np.arange(4).astype(np.float32))


def program(a, where):  # type: ignore[no-untyped-def]
    """Saves tensors in containers, without dimensions, of bfloat16, and gradients of such."""
    b = a * 2
    save(where, "b", {"k": (b, [a]), "s": b.sum(), "low": b.astype(ms.bfloat16)})
    b = save_grad(where, "z", b)
    total = save_grad(where, "total", b.sum())
    low = save_grad(where, "low", b.astype(ms.bfloat16))
    return (b * b).sum() + total * 2 + low.astype(ms.float32).sum()


def files(where: Path) -> dict[str, Any]:
    """What is in the files of a run, without the running ids."""
    found = {re.sub(r"_\d+\.npy$", "", str(p.relative_to(where))): np.load(p) for p in where.rglob("*.npy")}
    return {name: (array.dtype.name, array.shape, array.tolist()) for name, array in found.items()}


@pytest.mark.parametrize("mode", ["jit", "jit_all"])
def test_a_graph_writes_the_files_of_the_dynamic_graph(tmp_path: Path, mode: str) -> None:
    """Names, types, shapes and values are the same, and the gradient is that of the program without."""
    eager, compiled = str(tmp_path / "eager"), str(tmp_path / "compiled")
    expected = ms.grad(program)(X, eager)
    if mode == "jit":
        got = ms.grad(ms.jit(lambda_free(compiled)))(X)
    else:
        inner = ms.grad(lambda_free(compiled))

        @ms.jit
        def both(a):  # type: ignore[no-untyped-def]
            return inner(a)

        got = both(X)
    assert np.array_equal(got.asnumpy(), expected.asnumpy())
    here = files(tmp_path / "eager")
    assert set(here) == {f"step0/rank0/{name}_float32" for name in ("b.k.0", "b.k.1.0", "b.s", "b.low", "z_grad", "total_grad", "low_grad")}
    assert here["step0/rank0/total_grad_float32"] == ("float32", (), 2.0)
    assert here["step0/rank0/b.k.0_float32"] == ("float32", (4,), [0.0, 2.0, 4.0, 6.0])
    assert files(tmp_path / "compiled") == here


def lambda_free(where: str) -> Any:
    """`program` with its directory; the compiler wants a function with a name."""

    def bound(a):  # type: ignore[no-untyped-def]
        return program(a, where)  # type: ignore[no-untyped-call]

    return bound


@pytest.mark.parametrize(
    ("save_dir", "name", "data"), [("d", 1, X), ("d", "", X), (3, "n", X), ("d", "a/../b", X), ("d", "n", 3), ("d", "n", [X, None])]
)
def test_what_cannot_be_saved_is_said(save_dir: Any, name: Any, data: Any) -> None:
    """A name that is no file name, or data that is no tensor."""
    with pytest.raises(UsageError):
        save(save_dir, name, data)


def test_a_gradient_is_that_of_one_tensor() -> None:
    """Containers have no gradient of their own."""
    with pytest.raises(UsageError, match="one tensor"):
        save_grad("d", "n", [X])


def test_a_directory_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    """The training goes on with the same gradient."""
    (tmp_path / "file").write_text("")
    where = str(tmp_path / "file" / "x")
    expected = ms.grad(program)(X, str(tmp_path / "fine"))
    assert np.array_equal(ms.grad(ms.jit(lambda_free(where)))(X).asnumpy(), expected.asnumpy())
    assert ops.isfinite(expected).all()
