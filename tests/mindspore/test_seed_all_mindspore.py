"""`seed_all` of MindSpore: numbers that repeat, dropout that does nothing, and all of it taken back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from msprobe_engine.errors import UsageError
from msprobe_integrations.mindspore.seeds import seed_all, undo_seed_all

ONES = np.ones((8, 8), np.float32)


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    undo_seed_all()


class Dropping(nn.Cell):  # type: ignore[misc]
    """A dropout Cell and a dropout function."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(p=0.5)

    def construct(self, x: Any) -> Any:
        return self.drop(x) + ops.dropout(x, 0.5)


class Jitted(Dropping):
    """The same, compiled."""

    @mindspore.jit
    def construct(self, x: Any) -> Any:
        return self.drop(x) + ops.dropout(x, 0.5)


def drawn() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), ops.rand(3).asnumpy().tolist(), nn.Dense(3, 3).weight.asnumpy().tolist()


def test_the_same_seed_draws_the_same() -> None:
    """Python, numpy, operators and initializers repeat with the seed and differ with another."""
    seed_all(7)
    first = drawn()
    seed_all(7)
    assert drawn() == first
    seed_all(8)
    assert drawn() != first


@pytest.mark.parametrize("kind", [Dropping, Jitted])
def test_dropout_passes_through(kind: type[Dropping]) -> None:
    """rm_dropout reaches Cells that exist already and functions, eager and compiled; undo_seed_all lets them drop again."""
    before = kind()
    before.set_train()
    seed_all(1, rm_dropout=True)
    after = kind()
    after.set_train()
    for net in (before, after):
        assert (net(Tensor(ONES)).asnumpy() == 2).all()
    undo_seed_all()
    anew = kind()
    anew.set_train()
    assert (anew(Tensor(ONES)).asnumpy() != 2).any()


def test_dropout_imported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that a module took by name before is replaced there too."""
    monkeypatch.setitem(globals(), "taken", ops.dropout)
    seed_all(1, rm_dropout=True)
    assert (globals()["taken"](Tensor(ONES), p=0.5).asnumpy() == 1).all()


def test_deterministic_kernels_and_the_environment_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """mode chooses deterministic kernels; what the context writes into the environment is gone after undo."""
    monkeypatch.delenv("HCCL_DETERMINISTIC", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = mindspore.get_context("deterministic")
    seed_all(3, mode=True)
    seed_all(3, mode=True)
    assert mindspore.get_context("deterministic") == "ON"
    assert os.environ["PYTHONHASHSEED"] == "3"
    undo_seed_all()
    assert mindspore.get_context("deterministic") == before
    assert not {"HCCL_DETERMINISTIC", "PYTHONHASHSEED"} & os.environ.keys()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seed": -1}, "seed is -1; allowed: an int from 0 to 4294967295"),
        ({"seed": True}, "seed is True"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": "1"}, "seed is '1'"),
        ({"mode": 1}, "mode is 1; allowed: True or False"),
        ({"rm_dropout": None}, "rm_dropout is None; allowed: True or False"),
    ],
)
def test_wrong_values_change_nothing(arguments: dict[str, Any], said: str) -> None:
    """A wrong value is an error that names it, before anything is changed."""
    state = random.getstate()
    with pytest.raises(UsageError, match=said):
        seed_all(**arguments)
    assert random.getstate() == state
