"""A training under the existing monitor or ours, whichever interpreter runs it: ``existing_modules.py {old|new} {output directory}``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Odd(nn.Module):
    def forward(self, x: torch.Tensor, n: int, *, mask: torch.Tensor) -> Any:
        return x * n + mask, None, x * 3


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q * k).sum((2, 3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.odd = Odd()
        self.att = Attention()
        self.router = nn.Linear(6, 4, bias=False)
        self.out = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        a, _, b = self.odd(y, 2, mask=y + 1)
        heads = y[:1].view(1, -1, 1, 6)  # one batch, one head: what the existing tool looks at
        return self.out(a + b).sum() + self.att(heads, heads + 1).sum() + self.router(y).square().sum()


def train(begin: Callable[[int], Any], end: Callable[[int], Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        begin(step)
        torch.manual_seed(step)
        for _ in range(2):
            model(torch.randn(3, 4, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        end(step)


def nothing(_: int) -> None:
    return None


def old(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from msprobe.pytorch import TrainerMon

    keys = {
        "targets": {}, "xy_distribution": True, "ops": ["norm", "min", "max", "mean"], "ndigits": 12, "print_struct": False,
        "recording_l2_features": True, "sa_order": "b,s,h,d",
        "l2_targets": {"attention_hook": ["0:att"], "linear_hook": ["0:fc"], "moe_router_weight_hook": ["0:router"],
                       "moe_router_logit_hook": ["0:router"]},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(keys))
    os.environ["MONITOR_OUTPUT_DIR"] = str(directory / "monitor")
    monitor = TrainerMon(str(directory / "config.json"), params_have_main_grad=False)
    monitor.set_monitor(model, optimizer, grad_acc_steps=2)
    train(nothing, nothing, model, optimizer)


def new(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from msprobe_engine.core.settings.schema import LayerFeatureSettings, MonitorSettings, ProbeSettings
    from msprobe_integrations.torch.monitor.probe import TorchProbe

    features = LayerFeatureSettings(
        attention=("att",), attention_layout="b,s,h,d", linear=("fc",), router_weights=("router",), router_logits=("router",)
    )
    ops = ("norm", "min", "max", "mean")
    settings = MonitorSettings(gradients=False, activations=True, activation_gradients=True, ops=ops, layer_features=features)
    probe = TorchProbe(ProbeSettings(output_dir=str(directory), monitor=settings, strict=True))
    probe.attach(model, optimizer)
    train(probe.begin_step, lambda _: probe.end_step(), model, optimizer)
    probe.close()


if __name__ == "__main__":
    torch.manual_seed(3)
    net = Net()
    place = Path(sys.argv[2])
    place.mkdir(parents=True, exist_ok=True)
    (old if sys.argv[1] == "old" else new)(place, net, torch.optim.AdamW(net.parameters()))
