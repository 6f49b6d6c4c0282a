"""``save`` and ``save_grad``: the same files from compiled code and from code that is not."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from msprobe_engine.errors import UsageError
from msprobe_integrations.mindspore.graph import single_files
from msprobe_integrations.mindspore.graph.single import save, save_grad

X = Tensor(np.arange(4).astype(np.float32))


@pytest.fixture(autouse=True)
def _first_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(single_files, "_step", 0)
    monkeypatch.setattr(single_files, "_ids", itertools.count())


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
