"""The core of the integration on one version of Transformers, the installed one (`nox -t transformers` installs others).

Versions differ in what the Trainer makes of the model's loss: 4.46 adds up the micro batches of GPT-2 where later ones take their mean, and
its log has four digits. So gradients and moments are held against float64 with a loss of the test's own, and the rest against the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.case import CLIP
from harness.checks import compare
from harness.frameworks import transformers_trainer as hf
from harness.memory import everything, files, seen
from harness.models import by_hand, make_gpt
from harness.run import ask, digest, ranks, write_settings
from log_lines import heard

pytestmark = [pytest.mark.framework, pytest.mark.slow]
FAMILIES = ("monitor: gradients", "monitor: parameters", "monitor: optimizer", "same bits")


def own_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean over all predictions; `tokens`: [samples, 8] int64."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 32), tokens[:, 1:].reshape(-1))


class OwnLoss(hf.InOrder):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss = own_loss(model, inputs["input_ids"])
        return (loss, {}) if return_outputs else loss


def job(folder: Path, file: Path | None, made: Any, arguments: dict[str, Any]) -> Any:
    """Train; bits, what was seen, what the Trainer has logged, what the probe had to do without."""
    lines = heard()
    ask(file, "transformers", "torch", "accelerate")
    trainer = hf.make_trainer(folder, made=made, logging_steps=1, **arguments)
    trainer.train()
    log = [(entry["loss"], float(entry["grad_norm"]), entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry]
    return digest(trainer.model.parameters()), seen(), log, [line for line in lines if "without it" in line or "fault" in line]


def both(tmp_path: Path, n: int, made: Any, arguments: dict[str, Any], **sections: Any) -> list[Any]:
    """Without the probe and with it: the same bits, the same log. What each rank has seen, and the log."""
    plain = ranks(n, job, tmp_path / "plain", None, made, arguments)
    followed = ranks(n, job, tmp_path / "followed", write_settings(tmp_path, **sections), made, arguments)
    for (bits, _, log, _), (again, found, same, lost) in zip(plain, followed):
        assert (bits, log) == (again, same)
        assert lost == []
        assert found["faults"] == []
    return [(found, log) for _, found, log, _ in followed]


def test_numbers(tmp_path: Path) -> None:
    """Two ranks: gradients, parameters and moments are those of a training by hand in float64 with the batches of both."""
    batches = [[range(4 * step, 4 * step + 4)] for step in range(3)]
    tokens = torch.stack([hf.Samples()[i]["input_ids"] for i in range(12)])
    expected = by_hand(
        make_gpt(),
        lambda model, numbers: own_loss(model, tokens[list(numbers)]),
        batches,
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
        clip=CLIP,
    )
    for found, _ in both(tmp_path, 2, OwnLoss, {"gradient_accumulation_steps": 1}):
        assert found["steps"] == [0, 1, 2]
        assert compare(found["norms"], expected) > 100


def test_steps(tmp_path: Path) -> None:
    """Two micro batches per update, evaluation and a checkpoint after each: steps, loss, gradient norm and learning rate are the Trainer's,
    which has the norm of the gradients that are seen; evaluation is not; all that files are asked for is written."""
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    ((found, log),) = both(tmp_path, 1, hf.InOrder, every, **everything())
    assert found["steps"] == [0, 1, 2]
    assert found["micro"]["actv", 0] == {0, 1}
    for step, (loss, norm, rate) in enumerate(log):
        scalars = found["scalars"][step]
        total = sum(value**2 for (family, s, _), value in found["norms"].items() if family == "grad_reduced" and s == step) ** 0.5
        assert float(scalars["loss"]) == pytest.approx(loss, abs=1e-4)
        assert float(scalars["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        assert total == pytest.approx(norm, rel=1e-4)
        assert (scalars["learning_rate"], scalars["skipped"]) == (rate, 0.0)
    assert len([name for name in found["entries"][1] if ".lm_head.Linear.forward" in name]) == 2
    assert files(tmp_path) == {"dump": True, "grad_probe": True, "incident": True}
