"""Which modules are meant, and what they are called."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from watched import monitor, watch

from msprobe_engine.core.errors import SettingsError
from msprobe_integrations.common.monitor.targets import find_unmatched, is_named, matches
from msprobe_integrations.torch.monitor.targets import named_modules

pytestmark = pytest.mark.framework


@pytest.mark.parametrize(
    ("name", "targets", "chunk", "expected"),
    [
        ("layers.1.mlp", (), 0, True),
        ("layers.1", ("layers.1",), 0, True),
        ("layers.1.mlp", ("layers.1",), 0, True),
        ("layers.10", ("layers.1",), 0, False),
        ("layers.10.mlp", ("layers.?.mlp",), 0, False),
        ("layers.3.mlp.fc", ("layers.*.mlp",), 0, True),
        ("layers.0", ("1:layers.0",), 0, False),
        ("layers.0", ("1:layers.0",), 1, True),
        ("layers.0", ("module.module.layers.0",), 0, True),
        ("fc", ("_orig_mod.fc",), 0, True),
        ("", ("fc",), 0, False),
    ],
)
def test_matches(name: str, targets: tuple[str, ...], chunk: int, expected: bool) -> None:
    """A target is whole path components and everything below it; patterns, chunk prefixes and names with wrappers are understood."""
    assert matches(name, targets, chunk) is expected


def test_is_named_means_one_module() -> None:
    """Features are of the named module alone, not of what is below it; without names there are none."""
    assert is_named("layers.0.attn", ("layers.*.attn",))
    assert not is_named("layers.0.attn.core", ("layers.0.attn",))
    assert not is_named("layers.0.attn", ())


class Wrapper(nn.Module):
    """What DDP and mixed-precision wrappers look like."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(x)
        return out


def test_names_are_without_wrappers() -> None:
    """A module is called the same with and without wrappers, is there once, and the hooks stand on what the user calls."""
    inner = nn.Sequential(
        nn.Linear(3, 3), checkpoint_wrapper(nn.Sequential(nn.Linear(3, 3))), torch.compile(nn.Linear(3, 3), backend="eager")
    )
    found = list(named_modules([Wrapper(Wrapper(inner))]))
    assert [n.name for n in found] == ["", "0", "1", "1.0", "2"]
    assert found[0].module is found[0].root is inner
    assert found[2].hooked is inner[1]
    assert found[4].hooked is inner[2]
    assert found[4].module is inner[2]._orig_mod


def test_inside_of_compiled_code_is_sealed() -> None:
    """What lies inside of a compiled module is known and not hooked."""
    model = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager"))
    assert [(n.name, n.sealed) for n in named_modules([model])] == [("", False), ("0", False), ("0.0", True)]


def test_nearest_names() -> None:
    """What nothing is called comes with the names that look most like it; a chunk that does not have the name does not count."""
    names = [["layers.0.mlp", "layers.0.attn"], ["layers.0.norm"]]
    assert find_unmatched(["layers.0", "1:layers.0.norm"], names) == {}
    found = find_unmatched(["layers.0.mpl", "0:layers.0.norm"], names)
    assert found["layers.0.mpl"][0] == "layers.0.mlp"
    assert found["0:layers.0.norm"]


def test_target_without_a_match_raises_in_strict_mode() -> None:
    """A target that matches neither a module nor a parameter is an error of the settings that names what is near."""
    model = nn.Sequential(nn.Linear(3, 3))
    watch(model, monitor(activations=True, targets=("0.weight",)), lambda _: None)  # a parameter
    with pytest.raises(SettingsError, match=r"monitor\.targets.*'0\.weigth'.*'0\.weight'"):
        watch(model, monitor(activations=True, targets=("0.weigth",)), lambda _: None)


def test_target_without_a_match_is_said_and_the_rest_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    """Outside of strict mode the mistake is said once and counted, and what does match is watched."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    caplog.set_level(logging.ERROR, "msprobe")
    frames = watch(model, monitor(activations=True, targets=("1", "2")), lambda _: model(torch.ones(1, 3)), strict=False)
    assert {s.name for s in frames[0].samples} == {"1.input", "1.output"}
    said = {record.getMessage() for record in caplog.records}
    assert len(said) == 1
    assert "nothing in the model is called '2'" in said.pop()
