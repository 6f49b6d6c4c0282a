"""Masks of real models are no fault, and a logarithm of zero in the forward pass is named before what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.schema import IncidentSettings, MonitorSettings, ProbeSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
STEPS, BAD = 3, 2


def probed(root: Path, level: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> TorchProbe:
    monitor = MonitorSettings(activations=True)
    probe = TorchProbe(ProbeSettings(output_dir=str(root), strict=True, monitor=monitor, incident=IncidentSettings(level=level)))
    probe.attach(model, optimizer)
    return probe


def commands(root: Path) -> list[list[str]]:
    return [["monitor", "analyze", str(root / "run")], ["diagnose", str(root / "run" / "monitor"), "-o", str(root / "page")]]


def transformer(name: str) -> Any:
    import transformers as hf

    if name == "gpt2":
        config = hf.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0)
        config._attn_implementation = "eager"
        return hf.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=32, attn_implementation="eager", bos_token_id=0, eos_token_id=0, **sizes))


def train(root: Path, level: str, name: str, bad: int = -1) -> None:
    """Tokens with an additive mask of -Inf; the loss of step `bad` is NaN."""
    torch.manual_seed(0)
    model = transformer(name)
    optimizer = torch.optim.AdamW(model.parameters())
    probe = probed(root, level, model, optimizer)
    mask = torch.zeros(1, 1, 8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    for step in range(STEPS):
        probe.begin_step(step)
        tokens = torch.randint(0, 32, (2, 8))
        loss = model(input_ids=tokens, attention_mask=mask.expand(2, 1, 8, 8), labels=tokens).loss * (torch.nan if step == bad else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step({"loss": loss})
    probe.close()


@pytest.mark.parametrize("level", ["", "mix"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.fast_cells("llama-")
def test_masks_of_a_transformer(name: str, level: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No alert, no finding, and all commands say what was passed over and where."""
    train(tmp_path / "run", level, name)
    assert "ALERT" not in capfd.readouterr().err
    for words in (*commands(tmp_path), ["monitor", "report", str(tmp_path / "run")]):
        assert main(words) == 0
        assert "did no harm and was taken for that of masks" in capfd.readouterr().out


@pytest.mark.parametrize("level", ["", "mix"])
def test_a_fault_beside_masks(level: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the first step, when nothing is known of the masks yet: the loss is named, and that there were masks is said."""
    train(tmp_path / "run", level, "gpt2", bad=0)
    first = next(line for line in capfd.readouterr().err.splitlines() if "ALERT" in line)
    assert "Inf of" not in first
    assert "was taken for that of masks, the first is" in first


class Logarithm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


@pytest.mark.parametrize(("level", "name"), [("", "2.output"), ("mix", "Torch.log.0.forward.output.0")])
@pytest.mark.parametrize("bad", [0, BAD])
def test_a_logarithm_of_zero(bad: int, level: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Alert, summary of the incident and commands name the module, or the operator, in whose output -Inf was born."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Logarithm(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = probed(tmp_path / "run", level, model, optimizer)
    for step in range(STEPS):
        probe.begin_step(step)
        data = torch.ones(2, 4)
        if step == bad:
            with torch.no_grad():
                model[0].bias[0] = -1e4
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step({"loss": loss})
    probe.close()
    first = next(line for line in capfd.readouterr().err.splitlines() if "ALERT" in line)
    assert f"nan_inf: {name}" in first
    assert "2 -Inf of 8 elements" in first
    (summary,) = tmp_path.glob(f"run/incidents/step{bad}-nan_inf/summary.md")
    assert f"Earliest in the order of execution: `{name}`" in summary.read_text()
    for words in commands(tmp_path):
        assert main(words) == 1
        assert name.removesuffix(".output.0") in capfd.readouterr().out.splitlines()[0]
