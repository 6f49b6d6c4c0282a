"""`seed_all` and its undo."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from existing_environment import environment_of, existing_tool
from torch import nn
from torch.nn import functional
from torch.nn.functional import dropout as early_dropout

from msprobe.pytorch import seed_all, undo_seed_all
from msprobe_engine.core.errors import UsageError

ENVIRONMENT = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC")


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    python, numpy, processor = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    undo_seed_all()
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(processor)


def draw() -> tuple[float, ...]:
    """One number of each library and one of an in-place method."""
    return random.random(), np.random.rand(), torch.rand(()).item(), torch.empty(()).uniform_().item()


@pytest.mark.parametrize("seed", [True, -1, 2**32, 1.0, "1", None])
def test_seed_is_checked(seed: Any) -> None:
    """Only an int from 0 to 2**32 - 1 is a seed (a bool is none); the message names the value."""
    with pytest.raises(UsageError, match="allowed: an int from 0 to 4294967295") as raised:
        seed_all(seed)
    assert repr(seed) in str(raised.value)


@pytest.mark.parametrize("name", ["mode", "rm_dropout", "is_enhanced"])
def test_switches_are_checked(name: str) -> None:
    """Switches are True or False; nothing is changed by a call with a bad one."""
    before = torch.get_rng_state()
    with pytest.raises(UsageError, match=f"{name} is 1; allowed: True or False"):
        seed_all(3, **{name: 1})  # type: ignore[arg-type]
    assert torch.equal(before, torch.get_rng_state())


def test_same_numbers_every_time() -> None:
    """All three libraries are seeded, as their own functions would do it."""
    seed_all(7)
    drawn = draw()
    seed_all(7)
    assert draw() == drawn
    assert drawn[0] == random.Random(7).random()
    assert drawn[1] == np.random.RandomState(7).rand()
    assert drawn[2] == torch.rand((), generator=torch.Generator().manual_seed(7)).item()


def test_environment_and_algorithms_come_back() -> None:
    """`undo_seed_all` restores the environment and the choice of algorithms of before the first call. Variables of devices that are
    not there are not set."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    seed_all(5, mode=True)
    assert os.environ["PYTHONHASHSEED"] == "5"
    assert torch.are_deterministic_algorithms_enabled()
    if not torch.cuda.is_available():
        assert {n: os.environ.get(n) for n in ENVIRONMENT[1:]} == {n: before[n] for n in ENVIRONMENT[1:]}
    seed_all(6, mode=False)
    assert not torch.are_deterministic_algorithms_enabled()
    undo_seed_all()
    assert {name: os.environ.get(name) for name in ENVIRONMENT} == before
    assert not torch.are_deterministic_algorithms_enabled()


DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_functions_pass_their_input(name: str) -> None:
    """With rm_dropout every dropout function gives its input, draws nothing, and still refuses a bad probability; afterwards the
    function of before is back."""
    original = getattr(functional, name)
    x = torch.randn(2, 3, 4)
    seed_all(1, rm_dropout=True)
    state = torch.get_rng_state()
    assert torch.equal(getattr(functional, name)(x, 0.5, True), x)
    assert torch.equal(getattr(functional, name)(x, p=0.9, training=True, inplace=True), x)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="between 0 and 1"):
        getattr(functional, name)(x, 1.5, True)
    undo_seed_all()
    assert getattr(functional, name) is original


def _attention(dropout: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)


def _layers(make: Callable[[float], Any]) -> Callable[[float], Any]:
    def made(dropout: float) -> Any:
        torch.manual_seed(0)
        return make(dropout)

    return made


@pytest.mark.parametrize(
    "make",
    [
        nn.Dropout,
        lambda p: nn.Dropout2d(p),
        lambda p: lambda x: early_dropout(x, p),
        _attention,
        _layers(lambda p: nn.LSTM(8, 8, 2, dropout=p)),
        _layers(lambda p: nn.GRU(8, 8, 2, dropout=p)),
        _layers(lambda p: nn.TransformerEncoderLayer(8, 2, dropout=p)),
    ],
    ids=["module", "2d", "early import", "attention", "lstm", "gru", "transformer"],
)
def test_whatever_drops_passes_its_input(make: Callable[[float], Any]) -> None:
    """Modules, names imported before, attention and recurrent layers give with rm_dropout what they give with probability 0."""
    x = torch.randn(2, 3, 8)
    exact, dropping = make(0.0), make(0.5)

    def differ() -> bool:
        a, b = exact(x), dropping(x)
        return not torch.equal(a[0] if isinstance(a, tuple) else a, b[0] if isinstance(b, tuple) else b)

    assert differ()
    seed_all(1, rm_dropout=True)
    assert not differ()
    undo_seed_all()
    assert differ()


def test_scripted_dropout_is_removed_too() -> None:
    """torch.jit.script still compiles a model while dropout is removed, without dropout in it."""
    seed_all(1, rm_dropout=True, is_enhanced=True)
    scripted = torch.jit.script(nn.Sequential(nn.Dropout(0.5), nn.Identity()))
    assert torch.equal(scripted(torch.ones(64)), torch.ones(64))


def test_enhanced_calls_start_from_one_state() -> None:
    """Every call gives the numbers that the seed gives first, whatever was drawn or seeded before; undone, the streams go on."""
    seed_all(9)
    first = dict(zip("pnt", draw()))
    seed_all(9, is_enhanced=True)
    for _ in range(2):
        again = draw()
        assert again[:2] == (first["p"], first["n"])
        assert again[2] == again[3] == first["t"]
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
    undo_seed_all()
    seed_all(9)
    assert draw()[2] != draw()[2]


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.randn(3),
        lambda: torch.randperm(9),
        lambda: torch.bernoulli(torch.full((64,), 0.5)),
        lambda: torch.normal(0.0, 1.0, (3,)),
        lambda: torch.empty(3).exponential_(),
        lambda: nn.Linear(3, 3).weight,
        lambda: functional.dropout(torch.ones(64)),
        lambda: nn.Dropout()(torch.ones(64)),
        lambda: early_dropout(torch.ones(64)),
        lambda: functional.scaled_dot_product_attention(*[torch.ones(1, 8, 4)] * 3, dropout_p=0.5),
        lambda: functional.gumbel_softmax(torch.zeros(4)),
        lambda: torch.distributions.Normal(0.0, 1.0).sample(),
        lambda: torch.tensor(random.choices(range(1000), k=4)),
        lambda: torch.tensor(np.random.permutation(20)),
        lambda: torch.tensor(np.random.default_rng().random(3)),
    ],
)
def test_enhanced_covers(work: Callable[[], torch.Tensor]) -> None:
    """Two calls in a row give the same numbers, and other calls between them make no difference."""
    seed_all(11, is_enhanced=True)
    one = work()
    draw()
    assert torch.equal(one, work())


def test_own_generators_are_left_alone() -> None:
    """A call with a generator of the program's own goes on from call to call."""
    seed_all(3, is_enhanced=True)
    own = torch.Generator().manual_seed(4)
    plain = torch.Generator().manual_seed(4)
    drawn = [torch.rand((), generator=own).item() for _ in range(2)]
    assert drawn[0] != drawn[1]
    undo_seed_all()
    assert drawn == [torch.rand((), generator=plain).item() for _ in range(2)]


def test_nothing_stays_behind() -> None:
    """After the undo every replaced name of torch, numpy, random and this module is what it was."""
    owners = (torch, torch.Tensor, functional, torch._VF, np.random, random, sys.modules[__name__])
    before = [dict(vars(owner)) for owner in owners]
    builtins = dict(torch.jit._builtins._get_builtin_table())
    seed_all(1, rm_dropout=True, is_enhanced=True)
    seed_all(2, rm_dropout=True, is_enhanced=True)
    assert vars(torch)["rand"] is not before[0]["rand"]
    undo_seed_all()
    for owner, names in zip(owners, before):
        assert {n: v for n, v in vars(owner).items() if v is not names.get(n) and callable(v)} == {}, owner
    assert torch.jit._builtins._get_builtin_table() == builtins


def test_a_later_patch_of_the_program_stays() -> None:
    """What the program put in place of a wrapped function afterwards is not overwritten by the undo."""
    original = torch.rand
    seed_all(1, is_enhanced=True)

    def own(*_: Any) -> None:
        return None

    torch.rand = own  # type: ignore[assignment]
    try:
        undo_seed_all()
        assert torch.rand is own
    finally:
        torch.rand = original


EXISTING = """
import random, sys, numpy as np, torch
from msprobe.pytorch import seed_all
seed_all(77, False, False, sys.argv[1] == "enhanced")
numbers = [random.random(), random.random(), random.gauss(0, 1), random.choice(range(1000)), *map(float, np.random.rand(2))]
numbers += [float(np.random.normal()), torch.rand(1).item(), torch.rand(1).item(), torch.randn(5)[4].item(), torch.randperm(100)[7].item()]
numbers += [torch.empty(3).uniform_()[2].item(), torch.empty(3).normal_()[2].item(), torch.nn.Linear(3, 3).weight[1, 1].item()]
numbers += [torch.rand(1, generator=torch.Generator().manual_seed(5)).item()]
print("NUMBERS", numbers)
"""


@pytest.mark.slow
@pytest.mark.existing_tool
@pytest.mark.parametrize("way", ["plain", "enhanced"])
def test_numbers_of_the_existing_tool(way: str) -> None:
    """The same seed gives the numbers that the existing tool gives, enhanced or not."""
    shown = []
    for python in (sys.executable, existing_tool("26.2.0").python):
        environment = environment_of(python)
        command = [str(python), "-c", EXISTING, way]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=True, cwd="/")
        shown.append(ran.stdout[ran.stdout.index("NUMBERS") :])
    assert shown[0] == shown[1]
