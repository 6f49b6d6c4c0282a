"""What the gradient probe writes: files, columns and numbers."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grad_training import build, collect, settings, table, update
from safetensors.numpy import load_file

from msprobe_engine.formats.grad_probe import layout, signs
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger


def gradients(steps: int = 1, seed: int = 0, poison: str = "") -> list[dict[str, torch.Tensor]]:
    """The gradients of the same training without a probe."""
    net, optimizer = build(seed)
    out: list[dict[str, torch.Tensor]] = []
    hook = optimizer.register_step_pre_hook(
        lambda *_: out.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
    )
    for _ in range(steps):
        update(net, optimizer, poison)
    hook.remove()
    return out


def test_level_l0(tmp_path: Path) -> None:
    """Columns of the existing tool; MD5 is the CRC-32 of the float32 bytes; no signs are kept."""
    collect(tmp_path, "L0")
    rows = table(tmp_path, 1)
    assert list(rows[0]) == ["param_name", "MD5", "max", "min", "norm", "shape"]
    for row, (name, grad) in zip(rows, gradients(2)[1].items(), strict=True):
        assert row["param_name"] == name
        assert row["MD5"] == f"{zlib.crc32(grad.numpy().tobytes()):08x}"
        assert (float(row["max"]), float(row["min"])) == (grad.max().item(), grad.min().item())
        assert float(row["norm"]) == pytest.approx(grad.norm().item(), rel=1e-6)
        assert json.loads(row["shape"]) == list(grad.shape)
    assert sorted(p.name for p in (tmp_path / "rank0").iterdir()) == ["grad_summary_0.csv", "grad_summary_1.csv"]


def test_level_l1_signs(tmp_path: Path) -> None:
    """One bool array per parameter says ``gradient > 0``; the packed signs tell zero and negative apart."""
    collect(tmp_path, "L1", steps=1)
    (grads,) = gradients()
    packed = load_file(tmp_path / "rank0" / layout.signs_name(0))
    assert list(table(tmp_path)[0]) == ["param_name", "max", "min", "norm", "shape"]
    assert {p.stem for p in (tmp_path / "rank0" / "step0").iterdir()} == set(grads)
    for name, grad in grads.items():
        array = np.load(tmp_path / "rank0" / "step0" / f"{name}.npy", allow_pickle=False)
        assert array.dtype == np.bool_
        assert np.array_equal(array, (grad > 0).numpy())
        codes = np.where(grad > 0, signs.POSITIVE, np.where(grad < 0, signs.NEGATIVE, signs.ZERO))
        assert packed[name].tolist() == signs.pack(codes).tolist()
    assert (packed["0.weight"] != 0).any()


def test_packed_only(tmp_path: Path) -> None:
    """direction_format packed writes no file per parameter."""
    collect(tmp_path, steps=1, direction_format="packed")
    assert sorted(p.name for p in (tmp_path / "rank0").iterdir()) == ["grad_summary_0.csv", "step0.signs"]


@pytest.mark.parametrize("bounds", [[], [0], [-0.01, 0, 0.1], [-1.5, 2]])
def test_level_l2_shares(tmp_path: Path, bounds: list[float]) -> None:
    """Shares of the intervals add up to one, `=0` stands beside them; without bounds nothing is shifted."""
    collect(tmp_path, "L2", steps=1, bounds=bounds)
    rows = table(tmp_path)
    names = layout.intervals(bounds)
    assert list(rows[0]) == ["param_name", *names, "=0", "max", "min", "norm", "shape", "NaN"]
    for row, grad in zip(rows, gradients()[0].values(), strict=True):
        assert float(row["=0"]) == pytest.approx((grad == 0).double().mean().item())
        assert float(row["NaN"]) == 0
        edges = [-np.inf, *bounds, np.inf]
        for name, low, high in zip(names, edges, edges[1:]):
            inside = (grad > np.float32(low)) & (grad <= np.float32(high))
            assert float(row[name]) == pytest.approx(inside.double().mean().item())
        assert sum(float(row[name]) for name in names) == pytest.approx(1 if names else 0)


def test_nan_is_in_no_interval(tmp_path: Path) -> None:
    """NaN has a column of its own, is in no interval and is no zero; the statistics show it."""
    collect(tmp_path, "L2", steps=1, poison="1.weight")
    row = next(r for r in table(tmp_path) if r["param_name"] == "1.weight")
    assert float(row["NaN"]) == 1
    assert all(float(row[name]) == 0 for name in (*layout.intervals([-1, 0, 1]), "=0"))
    assert (row["max"], row["min"], row["norm"]) == ("nan", "nan", "nan")
    assert set(np.unique(load_file(tmp_path / "rank0" / "step0.signs")["1.weight"])) == {255}


def test_header_shows_bounds_as_written(tmp_path: Path) -> None:
    """Column names have the bounds as they stand in the settings."""
    collect(tmp_path, "L2", steps=1, bounds=[-1.0, 0, 2])
    assert list(table(tmp_path)[0])[1:5] == ["(-inf, -1.0]", "(-1.0, 0]", "(0, 2]", "(2, inf)"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(tmp_path: Path, dtype: torch.dtype) -> None:
    """Checksums are of the float32 values, numbers are exact in every type."""
    net = torch.nn.Linear(3, 2).to(dtype)
    debugger = PrecisionDebugger(settings(tmp_path, "L0"))
    debugger.monitor(net)
    net(torch.ones(1, 3, dtype=dtype)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    debugger.stop()
    row = table(tmp_path)[0]
    assert row["MD5"] == f"{zlib.crc32(net.weight.grad.float().numpy().tobytes()):08x}"
    assert float(row["max"]) == net.weight.grad.max().item()


def test_main_grad_comes_first(tmp_path: Path) -> None:
    """Where a framework accumulates in main_grad, that is the gradient; a parameter without any has no row."""
    net = torch.nn.Linear(3, 2)
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net)
    net.weight.main_grad = torch.full((2, 3), -2.0)
    net.weight.grad = torch.ones(2, 3)
    torch.optim.SGD([net.weight], lr=0.1).step()
    debugger.stop()
    assert [(r["param_name"], r["max"]) for r in table(tmp_path)] == [("weight", "-2.0")]


def test_sparse_gradient(tmp_path: Path) -> None:
    """A sparse gradient has the parameter's shape; what is not stored is zero."""
    net = torch.nn.Embedding(6, 2, sparse=True)
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net)
    net(torch.tensor([1, 1, 4])).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    debugger.stop()
    (row,) = table(tmp_path)
    assert (row["max"], row["min"], row["shape"]) == ("2.0", "0.0", "[6, 2]")
    assert np.load(tmp_path / "rank0/step0/weight.npy").any(1).tolist() == [False, True, False, False, True, False]


def test_odd_names(tmp_path: Path) -> None:
    """A name that cannot be a file name is made one that is no other parameter's; the table has the name itself."""
    names = ["a/b", "a_b", "../x", "n" * 240, "n" * 239 + "/"]
    holder = torch.nn.Module()
    for name in names:
        holder._parameters[name] = torch.nn.Parameter(torch.ones(2))
    debugger = PrecisionDebugger(settings(tmp_path / "out"))
    debugger.monitor(holder)
    for parameter in holder.parameters():
        parameter.grad = torch.ones(2)
    torch.optim.SGD(holder.parameters(), lr=0.1).step()
    debugger.stop()
    assert [r["param_name"] for r in table(tmp_path / "out")] == names
    assert len(list((tmp_path / "out/rank0/step0").glob("*.npy"))) == len(names)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_same_training(tmp_path: Path) -> None:
    """The training has the same bits, and draws the same random numbers, with the probe and without."""

    def run(path: Path | None) -> tuple[Any, ...]:
        debugger = None if path is None else PrecisionDebugger(settings(path, "L2"))
        net, optimizer = build()
        if debugger is not None:
            debugger.monitor(net)
        for _ in range(4):
            update(net, optimizer)
        if debugger is not None:
            debugger.stop()
        return [p.detach().numpy().tobytes() for p in net.parameters()], torch.get_rng_state().numpy().tobytes()

    assert run(tmp_path) == run(None)
    assert len(list((tmp_path / "rank0").glob("grad_summary_*.csv"))) == 4
