"""`torch.compile` under the monitor: what can be seen is seen, nothing is compiled again because of the monitor."""

from __future__ import annotations

import logging

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from watched import monitor, values, watch

pytestmark = pytest.mark.framework
BOTH = monitor(activations=True, activation_gradients=True, interval=2)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


class Net(nn.Sequential):
    """Code of torch's own, like that of `nn.Sequential`, is not compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self[1](self[0](x))
        return out


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return Net(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))


@pytest.mark.parametrize("way", ["wrapper", "in place", "behind the back"])
@pytest.mark.fast_cells("behind the back", "in place")
def test_model(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """A compiled model has its inputs and outputs, or nothing when only the original is known; what is not seen is said; it is compiled
    once, though hooks come and go."""
    caplog.set_level(logging.WARNING, "msprobe")
    model = net()
    called = model if way == "in place" else torch.compile(model, backend="eager")
    if way == "in place":
        model.compile(backend="eager")
    x = torch.randn(2, 3, requires_grad=True)
    found = values(watch(model if way == "behind the back" else called, BOTH, lambda _: called(x).sum().backward(), steps=4))
    expected = set() if way == "behind the back" else {".input", ".output"}
    assert {k[2] for k in found if k[0] == 2} == expected
    assert counters["stats"]["unique_graphs"] == 1
    assert any("not seen" in record.getMessage() for record in caplog.records)


def test_part_of_a_model() -> None:
    """A compiled part has its inputs and outputs, with the values of the same model without compilation."""
    x = torch.randn(2, 3)
    plain, compiled = net(), net()
    compiled[1] = torch.compile(compiled[1], backend="eager")
    expected = values(watch(plain, BOTH, lambda _: plain(x).sum().backward(), steps=3))
    found = values(watch(compiled, BOTH, lambda _: compiled(x).sum().backward(), steps=3))
    inside = {k for k in expected if k[2].startswith("1.")} - {k for k in expected if k[2] in ("1.input", "1.output")}
    assert found.keys() == expected.keys() - inside
    assert {k: v.norm for k, v in found.items()} == pytest.approx({k: expected[k].norm for k in found})
