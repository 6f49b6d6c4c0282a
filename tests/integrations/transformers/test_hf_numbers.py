"""What the probe says of steps of Hugging Face's Trainer is what the Trainer says itself, however it is used; with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hf_job
import pytest
import torch
from trainer_checks import asked, config, digest, ranks, seen
from transformers import TrainerCallback


class Few(torch.utils.data.IterableDataset):
    """Runs out amid the micro batches of a step."""

    def __iter__(self) -> Iterator[Any]:
        return (hf_job.Samples()[i] for i in range(7))


class Interrupting(TrainerCallback):
    """As if Ctrl-C were pressed after the first micro batch of the second step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == 1:
            raise KeyboardInterrupt


class Looking(TrainerCallback):
    """Evaluates between micro batches and predicts after every step."""

    trainer: Any = None

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.trainer.evaluate()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.predict(hf_job.Samples())


class Thrice(hf_job.InOrder):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 3, outputs) if return_outputs else outputs.loss * 3


def own_optimizer(trainer: Any) -> None:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)


def frozen(trainer: Any) -> None:
    for name, p in trainer.model.named_parameters():
        p.requires_grad_("mlp" in name)


def few(trainer: Any) -> None:
    trainer.train_dataset = Few()


def looking(trainer: Any) -> None:
    trainer.add_callback(Looking())
    trainer.callback_handler.callbacks[-1].trainer = trainer


def thrice(trainer: Any) -> None:
    trainer.__class__ = Thrice


def job(folder: Path, file: Path | None, arguments: dict[str, Any], change: Callable[[Any], None] | None) -> Any:
    """Train; bits, what was seen, what the Trainer has logged, what came out."""
    asked(file, "transformers", "torch", "accelerate")
    trainer = hf_job.make_trainer(folder, logging_steps=1, **arguments)
    if change is not None:
        change(trainer)
    raised = None
    try:
        trainer.train()
    except BaseException as error:
        raised = repr(error)
    log = [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry]
    return digest(trainer.model.parameters()), seen(), log, raised


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
EVERY = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
WAYS = {
    "compute_loss": ({}, thrice),
    "optimizer": ({}, own_optimizer),
    "label smoothing": ({"label_smoothing_factor": 0.1}, None),
    "compiled": (COMPILED, None),
    "recomputed": ({"gradient_checkpointing": True}, None),
    "partly frozen": ({}, frozen),
    "best model": ({**BEST, **EVERY}, None),
    "partial accumulation": ({"gradient_accumulation_steps": 5, "max_steps": -1, "num_train_epochs": 1}, None),
    "out of data": ({"gradient_accumulation_steps": 3}, few),
    "evaluating within steps": ({}, looking),
}


def test_ways(tmp_path: Path) -> None:
    """Loss, gradient norm and learning rate of every step are what the Trainer logs; no step comes twice; evaluation is not seen; the bits
    are those without the probe."""

    plain = [ranks(1, job, tmp_path / "out", None, *way)[0] for way in WAYS.values()]
    dumped = {"step": [1], "level": "L0"}
    found = [ranks(1, job, tmp_path / "out", config(tmp_path / name, dump=dumped), *way)[0] for name, way in WAYS.items()]
    for name, without, (bits, saw, log, raised) in zip(WAYS, plain, found):
        assert raised is None, name
        assert (bits, log) == (without[0], without[2]), name
        assert saw["steps"] == list(range(len(log))), name
        for step, (loss, norm, rate) in enumerate(log):
            scalars = saw["scalars"][step]
            assert float(scalars["loss"]) == pytest.approx(loss, rel=1e-6), (name, step)
            assert float(scalars["grad_norm"]) == pytest.approx(float(norm), rel=1e-5), (name, step)
            assert scalars["learning_rate"] == rate, (name, step)
            assert saw["complete"][step], (name, step)
        passes = [entry for entry in saw["entries"][1] if ".lm_head.Linear.forward" in entry]
        if name != "compiled":  # compiled modules are seen at their border
            assert len(passes) == len(saw["micro"]["actv", 1]), (name, passes)


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C comes out as it is, and the step that it cut off is marked as incomplete."""
    change = lambda trainer: trainer.add_callback(Interrupting())  # noqa: E731
    ((_, saw, _, raised),) = ranks(1, job, tmp_path, config(tmp_path), {}, change)
    assert raised == "KeyboardInterrupt()"
    assert saw["steps"] == [0, 1]
    assert saw["complete"] == {0: True, 1: False}
    assert saw["scalars"][1]["interrupted"] == 1.0


class Scaled(hf_job.InOrder):
    """With a loss scaler, which the Trainer itself has for fp16 on a GPU only (on a CPU ``fp16=True`` trains in fp32, without one); the
    gradients of step 1 overflow."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * 1e38 * 1e38 if self.state.global_step == 1 else loss


def test_skipped_update(tmp_path: Path) -> None:
    """A step whose update the scaler leaves out is a step of its own: `skipped`, with the scale that it was made with."""

    def scaled(folder: Path, file: Path | None) -> Any:
        asked(file, "transformers")
        trainer = hf_job.make_trainer(folder, made=Scaled, max_grad_norm=0.0)
        trainer.train()
        return digest(trainer.model.parameters()), seen()

    ((plain, _),) = ranks(1, scaled, tmp_path, None)
    ((bits, saw),) = ranks(1, scaled, tmp_path, config(tmp_path))
    assert bits == plain
    assert saw["steps"] == [0, 1, 2]
    assert [saw["scalars"][step]["skipped"] for step in (0, 1, 2)] == [0.0, 1.0, 0.0]
    assert [float(saw["scalars"][step]["loss_scale"]) for step in (0, 1, 2)] == [4.0, 4.0, 2.0]
