"""`SingleSave`: the user's own tensors as .npy files with their figures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from existing_environment import environment_of, existing_tool

from msprobe.core import SingleSave
from msprobe_engine.core.errors import UsageError


@pytest.fixture(autouse=True)
def _none() -> Iterator[None]:
    SingleSave._instance = None
    yield
    SingleSave._instance = None


def files(root: Path) -> list[str]:
    """All files below `root`."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_layout(tmp_path: Path) -> None:
    """One directory per key, step, rank and micro step; lists and dicts become one file per tensor."""
    SingleSave(tmp_path)
    one = torch.tensor([[1.5, 2.0]])
    SingleSave.save({"a": one, "lst": [one, (one,)], "d": {"x": one}})
    SingleSave.save({"a": one})
    SingleSave.step()
    SingleSave.save({"a": one})
    SingleSave.save_ex({"plain": one})
    SingleSave.save_ex({"chosen": one}, micro_batch=4)
    SingleSave.save_config({"lr": 0.1, "name": "中"})
    assert [f for f in files(tmp_path) if f.endswith(".npy")] == [
        "data/a/step0/rank0/micro_step0/a.npy",
        "data/a/step0/rank0/micro_step1/a.npy",
        "data/a/step1/rank0/micro_step0/a.npy",
        "data/chosen/step1/rank0/micro_step4/chosen.npy",
        "data/d/step0/rank0/micro_step0/d.x.npy",
        "data/lst/step0/rank0/micro_step0/lst.0.npy",
        "data/lst/step0/rank0/micro_step0/lst.1.0.npy",
        "data/plain/step1/rank0/plain.npy",
    ]
    assert np.load(tmp_path / "data/a/step0/rank0/micro_step0/a.npy").tolist() == [[1.5, 2.0]]
    said = json.loads((tmp_path / "data/lst/step0/rank0/micro_step0/lst.json").read_text())
    facts = {"max": 2.0, "min": 1.5, "mean": 1.75, "norm": 2.5, "shape": [1, 2]}
    assert said == {"data": [facts, [facts]]}
    assert json.loads((tmp_path / "configurations.json").read_text()) == {"lr": 0.1, "name": "中"}
    assert {oct(p.stat().st_mode & 0o7777) for p in tmp_path.rglob("*") if p.is_file()} <= {oct(0o640 & ~m) for m in (0, 0o022, 0o077)}


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (torch.tensor([1.5], dtype=torch.bfloat16), np.float32),
        (torch.tensor([1.5], dtype=torch.float16), np.float32),
        (torch.tensor([1.5]).to(torch.float8_e4m3fn), np.float32),
        (torch.tensor([1e300], dtype=torch.float64), np.float64),
        (torch.tensor([2**53 + 1]), np.int64),
        (torch.tensor([True, False]), np.float32),
        (torch.tensor([1 + 2j]), np.complex64),
        (torch.tensor([1 + 2j]).conj(), np.complex64),
        (torch.tensor([]), np.float32),
        (torch.tensor(3.0), np.float32),
        (torch.ones(3, 2).t(), np.float32),
        (torch.nn.Parameter(torch.ones(2)), np.float32),
    ],
)
def test_values_are_exact(tmp_path: Path, tensor: torch.Tensor, dtype: Any) -> None:
    """Values come back from the file without loss, in the shape they had; floats narrower than float32 and bool as float32."""
    SingleSave(tmp_path)
    SingleSave.save({"x": tensor})
    (path,) = tmp_path.rglob("*.npy")
    read = np.load(path)
    assert (read.dtype, read.shape) == (dtype, tuple(tensor.shape))
    wide = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else torch.int64
    assert torch.equal(torch.from_numpy(read).to(wide), tensor.detach().to(wide))


def test_nan_and_empty_have_figures(tmp_path: Path) -> None:
    """NaN shows in all four figures, without elements they are null."""
    SingleSave(tmp_path)
    SingleSave.save({"nan": torch.tensor([1.0, float("nan")]), "none": torch.tensor([])})
    facts = {p.stem: json.loads(p.read_text())["data"] for p in tmp_path.rglob("*.json")}
    assert all(np.isnan(facts["nan"][k]) for k in ("max", "min", "mean", "norm"))
    assert facts["none"] == {"max": None, "min": None, "mean": None, "norm": None, "shape": [0]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (torch.ones(1), "not a Tensor"),
        ({3: torch.ones(1)}, "the key 3 is a int"),
        ({"a/b": torch.ones(1)}, "no plain name"),
        ({"..": torch.ones(1)}, "no plain name"),
        ({"": torch.ones(1)}, "no plain name"),
        ({"x": 3}, "x is a int"),
        ({"x": [torch.ones(1), 3]}, "x.1 is a int"),
        ({"x": {"a/b": torch.ones(1)}}, "no plain name"),
        ({"x": torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (2,))}, "cannot be turned into numbers"),
    ],
)
def test_what_cannot_be_saved_is_said(tmp_path: Path, data: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be saved is left out whole, with one line that says why, and the training goes on."""
    SingleSave(tmp_path)
    SingleSave.save(data)
    assert files(tmp_path) == []
    assert said in capsys.readouterr().err


def test_a_list_in_itself_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list that holds itself is refused, not followed for ever."""
    endless: list[Any] = []
    endless.append(endless)
    SingleSave(tmp_path)
    SingleSave.save({"x": endless})
    assert "nested too deeply" in capsys.readouterr().err


def test_unwritable_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """When the place cannot be written, the file is named and the training goes on; micro steps count what was saved."""
    (tmp_path / "data").write_text("a file in the way")
    SingleSave(tmp_path)
    SingleSave.save({"x": torch.ones(1)})
    assert "cannot write" in capsys.readouterr().err
    (tmp_path / "data").unlink()
    SingleSave.save({"x": torch.ones(1)})
    assert "data/x/step0/rank0/micro_step0/x.npy" in files(tmp_path)


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Use before construction and bad arguments are errors; a second construction returns the first object and says so."""
    with pytest.raises(UsageError, match="construct it first"):
        SingleSave.save({})
    with pytest.raises(UsageError, match="dump_path is 3"):
        SingleSave(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="fmk is 'jax'"):
        SingleSave(tmp_path, fmk="jax")
    first = SingleSave(str(tmp_path))
    assert SingleSave(tmp_path / "other") is first
    assert f"goes on writing to {tmp_path}" in capsys.readouterr().err
    with pytest.raises(UsageError, match="not JSON serializable"):
        SingleSave.save_config({"x": object()})


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """The tensor, its gradient and the random stream are as without the call."""
    SingleSave(tmp_path)
    x = torch.ones(2, requires_grad=True)
    state, version = torch.get_rng_state(), x._version
    SingleSave.save({"x": x, "y": x * 2})
    assert torch.equal(state, torch.get_rng_state())
    assert (x._version, x.grad, x.requires_grad) == (version, None, True)


EXISTING = """
import torch
from msprobe.core import SingleSave
SingleSave("out")
torch.manual_seed(0)
for _ in range(2):
    for _ in range(2):
        pair = [torch.randn(2), torch.randn(3, dtype=torch.bfloat16)]
        SingleSave.save({"response": torch.randn(2, 3), "pair": pair, "d": {"k": torch.ones(1)}})
    SingleSave.save_ex({"loss": torch.randn(())})
    SingleSave.save_config({"lr": 1})
    SingleSave.step()
"""


@pytest.mark.slow
@pytest.mark.existing_tool
def test_files_of_the_existing_tool(tmp_path: Path) -> None:
    """The same files with the same arrays, and the same figures within the rounding of the tensor's own type, in which the existing
    tool computes them (bfloat16: three digits)."""
    script = tmp_path / "script.py"
    script.write_text(EXISTING)
    for name, python in (("ours", sys.executable), ("theirs", str(existing_tool("26.2.0").python))):
        (tmp_path / name).mkdir()
        subprocess.run([python, str(script)], capture_output=True, env=environment_of(python), timeout=240, check=True, cwd=tmp_path / name)
    ours, theirs = tmp_path / "ours/out", tmp_path / "theirs/out"
    assert files(ours) == files(theirs)
    for file in files(ours):
        if file.endswith(".npy"):
            a, b = np.load(ours / file), np.load(theirs / file)
            assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())
        else:
            one, other = json.loads((ours / file).read_text()), json.loads((theirs / file).read_text())
            assert _near(one, other), file


def _near(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(_near(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_near, a, b))
    return bool(np.isclose(a, b, rtol=5e-3, atol=1e-7))


def test_saving_leaves_the_memory_of_a_tensor_its_own(tmp_path: Path) -> None:
    """Sharded training resizes storages, which torch refuses once numpy has shared them; the default device is another one."""
    SingleSave(tmp_path)
    weight = torch.arange(6.0)
    with torch.device("meta"):
        SingleSave.save({"weight": weight})
    weight.untyped_storage().resize_(0)
    assert np.load(next(tmp_path.rglob("weight.npy"))).tolist() == [0, 1, 2, 3, 4, 5]
