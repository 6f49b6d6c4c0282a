"""Rows of pairs of MindSpore tensors, and histograms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

from msprobe_engine.core.guard import is_of_training
from msprobe_engine.core.statistics import histograms, pairs, rows
from msprobe_integrations.common.parameters.update_pairs import COMPUTED
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.parameters.optimizers import OptimizerView

RANDOM = np.random.default_rng(0)
GRAD, MEAN = (RANDOM.standard_normal((5, 7)).astype(np.float32) for _ in range(2))
SQUARE = np.abs(RANDOM.standard_normal((5, 7))).astype(np.float32)
STATES: dict[str, Any] = {"exp_avg": MEAN, "exp_avg_sq": SQUARE, "max_exp_avg_sq": 2 * SQUARE, "momentum_buffer": MEAN, "step": 3.0}
ADAM = {"betas": (0.9, 0.99), "eps": 1e-3}


def _tensors() -> dict[str, Any]:
    return {name: Tensor(value, mindspore.float32) for name, value in STATES.items()}


def _rooted(mean: np.ndarray, square: np.ndarray, eps: float) -> np.ndarray:
    return (mean / (1 - 0.9**3)) / (np.sqrt(square / (1 - 0.99**3)) + eps)


UPDATES: dict[str, tuple[str, dict[str, Any], np.ndarray]] = {
    "adam": ("adam", ADAM, _rooted(MEAN, SQUARE, 1e-3)),
    "amsgrad": ("adamw", {**ADAM, "amsgrad": True}, _rooted(MEAN, 2 * SQUARE, 1e-3)),
    "plain": ("sgd", {}, GRAD),
    "momentum": ("sgd", {"momentum": 0.9}, MEAN),
    "nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}, GRAD + 0.9 * MEAN),
    "decay": ("sgd", {"weight_decay": 0.1, "lr": Tensor(0.5)}, (GRAD + 0.1 * SQUARE) / (1 - 0.1 * 0.5)),
    "all": (
        "sgd",
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "lr": 0.5},
        (GRAD + 0.9 * MEAN + 0.1 * SQUARE) / (1 - 0.1 * 0.5),
    ),
    "lion": ("lion", {"betas": (0.9, 0.99)}, np.sign((1 - 0.9 / 0.99) * GRAD + 0.9 / 0.99 * MEAN)),
}


@pytest.mark.parametrize("kind", list(UPDATES))
def test_updates_are_what_the_optimizer_does(kind: str) -> None:
    """The direction of every known optimizer, from its states as tensors; the description is that of the gradient's shape."""
    algorithm, hyper, expected = UPDATES[kind]
    backend = MindSporeBackend()
    ref = backend.reduce_update(algorithm, Tensor(SQUARE), Tensor(GRAD), _tensors(), hyper)
    assert ref is not None
    row = backend.so_far()[ref.row]
    assert row[rows.SUM] == pytest.approx(float(expected.astype(np.float64).sum()), rel=1e-5, abs=1e-5)
    assert row[rows.SUMSQ] == pytest.approx(float(np.square(expected, dtype=np.float64).sum()), rel=1e-5)
    assert ref.description.shape == (5, 7)
    assert backend.unsupported == {}


def test_the_ratio_has_no_epsilon() -> None:
    """r = m_hat / sqrt(v_hat), for Adam alone."""
    backend = MindSporeBackend()
    ref = backend.reduce_ratio("adam", None, None, _tensors(), ADAM)
    assert ref is not None
    assert backend.so_far()[ref.row][rows.SUM] == pytest.approx(float(_rooted(MEAN, SQUARE, 0.0).sum()), rel=1e-5)
    assert backend.reduce_ratio("sgd", None, None, _tensors(), {}) is None


def test_what_is_not_known_has_no_update() -> None:
    """Other optimizers, states that are missing or of another size, and a step that was not made give None and are no fault."""
    backend = MindSporeBackend()
    grad = Tensor(GRAD)
    for algorithm, states, hyper in (
        ("muon", _tensors(), ADAM),
        ("adam", {}, ADAM),
        ("adam", {**_tensors(), "step": Tensor(0.0)}, ADAM),
        ("adam", _tensors(), {"eps": 1e-3}),
        ("rmsprop", {"square_avg": Tensor(SQUARE)}, {"centered": True}),
    ):
        assert backend.reduce_update(algorithm, None, grad, states, hyper) is None
    assert backend.reduce_update("adam", Tensor(np.ones(3, np.float32)), None, _tensors(), ADAM) is None
    assert backend.unsupported == {}


def test_agreement_is_the_share_of_equal_signs() -> None:
    """In any order of the memory, of types that may be paired; others are counted."""
    backend = MindSporeBackend()
    share = float((np.sign(GRAD) == np.sign(MEAN)).mean())
    a, b = Tensor(GRAD), Tensor(MEAN)
    pairings = ((a, b), (mint.transpose(a, 0, 1), mint.transpose(b, 0, 1)), (a.astype(mindspore.bfloat16), b.astype(mindspore.float64)))
    for first, second in pairings:
        ref = backend.reduce_agreement(first, second)
        row = backend.so_far()[ref.row]
        assert row[rows.SUM] / row.view(np.int64)[rows.COUNT] == pytest.approx(share)
    assert backend.reduce_agreement(a, Tensor(np.ones(35, np.int32))).row == -1
    assert backend.reduce_agreement(a, Tensor(np.ones(3, np.float32))).row == -1
    lazy = Tensor(shape=(5, 7), dtype=mindspore.float32, init=mindspore.common.initializer.One())
    assert backend.reduce_agreement(a, lazy).row == -1
    assert backend.unsupported == {"no pair kernel: Int32": 1, "pair of different sizes": 1, "not initialised": 1}


@pytest.mark.parametrize("kind", ["linear", "log2"])
def test_histograms_are_those_of_numpy(kind: str) -> None:
    """Of a view too, and of Adam's update, whose values exist for it alone."""
    backend = MindSporeBackend()
    view = backend.histogram(mint.transpose(Tensor(GRAD), 0, 1), kind)
    update = backend.histogram_of_update(_tensors(), ADAM, 1e-3, kind)
    table = backend.finish_step().rows()
    np.testing.assert_array_equal(histograms.counts(table, view, kind), histograms.count_values(GRAD, kind))
    made = pairs.values(pairs.RATIO, MEAN.reshape(-1), SQUARE.reshape(-1), ((1 - 0.9**3) ** -1, (1 - 0.99**3) ** -0.5, 1e-3))
    np.testing.assert_array_equal(histograms.counts(table, update, kind), histograms.count_values(made, kind))
    assert backend.histogram_of_update({}, ADAM, 1e-3, kind) == -1
    assert backend.histogram(Tensor([1.0], mindspore.hifloat8), kind) == -1


def test_a_failure_of_the_training_is_given_on() -> None:
    """Also where a pair or a histogram waits for the tensor."""
    looks: tuple[Callable[[Any, Any], Any], ...] = (lambda b, t: b.histogram(t, "log2"), lambda b, t: b.reduce_agreement(t, t))
    for look in looks:
        with pytest.raises(RuntimeError, match="Cumsum") as caught:
            look(MindSporeBackend(), mint.cumsum(Tensor(np.ones(4, np.float32)), 0))
        assert is_of_training(caught.value)


@pytest.mark.parametrize("made", [nn.Adagrad, nn.SGD])
@pytest.mark.parametrize("setting", [{"weight_decay": 0.1}, {"loss_scale": 2.0}])
def test_an_update_of_other_gradients_is_not_known(made: Any, setting: dict[str, float]) -> None:
    """Optimizers of mindspore.nn change gradients inside of their update: what is made of those that they are given is not the update."""
    network = nn.Dense(3, 2)
    plain, changed = (made(network.trainable_params(), learning_rate=0.1, **more) for more in ({}, setting))
    assert OptimizerView(plain).hyper(network.weight)["algorithm"] in COMPUTED
    assert OptimizerView(changed).hyper(network.weight)["algorithm"] == ""
